"""How much memory does a rank need to load its stages of a model in a folder?

A random Llama of about 1 GB is made on the spot and saved in several files. Then 4 processes load
it: each its own stages, or each the whole model by transformers, of which it keeps its stages.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from processes import environment

NUM_RANKS = 4
WAYS = ("load_pretrained", "from_pretrained")
SIZES = {
    "1 GB": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16},
}
MODELS = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "converted": {"tie_word_embeddings": False},
}
"""What is special about the models; the last is saved in 16 bits and loaded in 32."""
TINY_VOCABULARY = 256


@dataclass(frozen=True)
class OfRank:
    """What was measured on one rank, in bytes, and how long it took."""

    before: int
    """Resident before the model is loaded: all that is imported, with a tiny model's pipeline."""
    share: int
    """The parameters and buffers of this rank's stages."""
    peak: int
    """The growth of resident memory until all parameters were written to once, at its highest."""
    left: int
    """The growth that is left then."""
    seconds: float


def make_folder(folder: Path, model: str, size: str) -> None:
    """Save a random model in files of at most 200 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {**MODELS[model], **SIZES[size]}
    options["vocab_size"] = TINY_VOCABULARY if size == "tiny" else 32000
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=16, num_key_value_heads=8, **options)
    dtype = torch.bfloat16 if model == "converted" else torch.float32
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="200MB")


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since the mark was last taken away."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> int:
    """Let VmHWM begin anew; return what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def load(way: str, folder: Path, schedule: str) -> Any:
    """Return the pipeline of all ranks for the model in a folder."""
    import penstock

    model: Any
    if way == "load_pretrained":
        model = penstock.load_pretrained(folder, dtype=torch.float32)
    else:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        model.config.use_cache = False
    tokens = torch.randint(TINY_VOCABULARY, (8, 64))
    return penstock.parallelize(
        model, tokens, loss_fn=_loss, schedule=schedule, num_microbatches=8, device="cpu"
    )


def _loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def measure_rank(way: str, schedule: str, tiny: Path, folder: Path, result: Path) -> None:
    """What every rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    load(way, tiny, schedule).pipeline.close()
    before = forget_peak()
    begin = time.perf_counter()
    pipe = load(way, folder, schedule)
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        for weight in pipe.parameters():
            weight.add_(0)  # As an optimizer does: a mapped file is resident only when it is used.
    peak = resident_bytes("VmHWM")
    gc.collect()
    left = resident_bytes("VmRSS")
    tensors = {*pipe.parameters(), *(buffer for _, buffer in pipe.named_buffers())}
    share = sum(tensor.nbytes for tensor in tensors)
    own = OfRank(before, share, peak - before, left - before, seconds)
    (result / f"{dist.get_rank()}.json").write_text(json.dumps(asdict(own)))
    dist.barrier()
    pipe.pipeline.close()
    dist.destroy_process_group()


def run_ranks(way: str, schedule: str, tiny: Path, folder: Path) -> list[OfRank]:
    """Measure a way on new processes, with the allocator's usual settings."""
    with tempfile.TemporaryDirectory() as result:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(NUM_RANKS), __file__]
        command = [*launch, "--rank", way, schedule, str(tiny), str(folder), result]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        texts = [(Path(result) / f"{rank}.json").read_text() for rank in range(NUM_RANKS)]
    return [OfRank(**json.loads(text)) for text in texts]


def print_table(measured: dict[str, list[OfRank]]) -> None:
    columns = ("model, schedule, loaded by", "rank", "before", "share", "peak growth")
    print(f"| {' | '.join(columns)} | ÷ share | left ÷ share | s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, ranks in measured.items():
        for rank, own in enumerate(ranks):
            sizes = (own.before, own.share, own.peak)
            cells = [f"{size / 1e6:.0f} MB" for size in sizes]
            cells += [f"{own.peak / own.share:.2f}", f"{own.left / own.share:.2f}"]
            print(f"| {name} | {rank} | {' | '.join(cells)} | {own.seconds:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="the file for the figures, as JSON")
    parser.add_argument("--schedules", nargs="+", default=["ZB-V"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        way, schedule, *paths = options.rank
        measure_rank(way, schedule, *map(Path, paths))
        return
    measured: dict[str, list[OfRank]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folders = {size: Path(scratch) / f"{model} {size}" for size in SIZES}
            for size, folder in folders.items():
                make_folder(folder, model, size)
            for schedule in options.schedules:
                for way in options.ways:
                    name = f"{model}, {schedule}, {way}"
                    measured[name] = run_ranks(way, schedule, folders["tiny"], folders["1 GB"])
                    print(name, file=sys.stderr, flush=True)
    print_table(measured)
    if options.save:
        figures = {name: [asdict(own) for own in ranks] for name, ranks in measured.items()}
        found = {"environment": environment(), "measured": figures}
        options.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
