"""Train torchtitan's debug llama with its own trainer, on torch's pipelining and on Penstock's.

    python scripts/clients/compare_torchtitan.py --python VENV/bin/python [--only WORDS …] [-o FILE]

VENV has torchtitan and torch, not necessarily Penstock. Each case runs twice: as it is, and by
`penstock run`. The table compares the losses and gradient norms that torchtitan prints.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from client_runs import FAILS, start, verdict_on

TRAINER = Path(__file__).with_name("titan_on_cpu.py")
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
SPLIT = SCHEDULES[4:]
# In torchtitan 0.3: other names, and names that it does not have, with their values.
RENAMED = {
    "--model.hf_assets_path": "--hf_assets_path",
    "--training.dataset_path": "--dataloader.dataset_path",
    "--validation.dataset": "--validator.dataloader.dataset",
    "--validation.dataset_path": "--validator.dataloader.dataset_path",
    "--validation.enable": "--validator.enable",
    "--validation.freq": "--validator.freq",
    "--validation.steps": "--validator.steps",
    "--job.dump_folder": "--dump_folder",
}
DROPPED = (
    "--model.name",
    "--model.flavor",
    "--training.dataset",
    "--validation.local_batch_size",
    "--validation.seq_len",
)
OVERLAP = "--parallelism.no-pipeline_parallel_expert_parallel_overlap"
CHECKPOINT = "--activation_checkpoint.mode"
MAKE_ASSETS = """
import argparse, inspect, json, logging, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
root = Path(sys.argv[1])
text = "".join(inspect.getsource(module) for module in (argparse, inspect, json, logging))
lines = [text[i : i + 3000] for i in range(0, len(text), 3000)]
(root / "data").mkdir()
(root / "data" / "data.json").write_text("".join(json.dumps({"text": x}) + "\\n" for x in lines))
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
ends = ["<|begin_of_text|>", "<|end_of_text|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=ends, initial_alphabet=alphabet)
tokenizer.train_from_iterator(lines, trainer)
(root / "tokenizer").mkdir()
tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
config = {"bos_token": ends[0], "eos_token": ends[1]}
(root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
"""


@dataclass(frozen=True)
class Case:
    """One row of the table: a feature, a schedule, and what torchtitan is told besides."""

    feature: str
    schedule: str
    num_ranks: int = 2
    options: tuple[str, ...] = ()
    csv: str = ""
    """The registered schedule that is written to a CSV file for this case."""
    is_whole: bool = False
    """True if the file has whole backwards in place of split ones."""

    @property
    def name(self) -> str:
        return f"{self.num_ranks} ranks, {self.feature}, {self.schedule}"


def all_cases() -> Iterator[Case]:
    none = (CHECKPOINT, "none")
    for schedule in SCHEDULES:
        yield Case("pipeline alone", schedule, options=none)
    for mode in ("selective", "full"):
        for schedule in SCHEDULES:
            feature = f"{mode} checkpointing"
            yield Case(feature, schedule, options=(CHECKPOINT, mode))
    sharded = ("--parallelism.data_parallel_shard_degree", "2", *none)
    for schedule in SCHEDULES:
        yield Case("FSDP2", schedule, 4, sharded)
    tensor = ("--parallelism.tensor_parallel_degree", "2", *none)
    for schedule in SCHEDULES:
        yield Case("TP", schedule, 4, tensor)
    four = ("--parallelism.pipeline_parallel_degree", "4", "--training.local_batch_size", "8")
    for schedule in SCHEDULES:
        yield Case("pipeline alone", schedule, 4, (*four, *none))
    for schedule in ("1F1B", "Interleaved1F1B", *SPLIT):
        options = ("--training.global_batch_size", "8", *none)
        yield Case("gradient accumulation", schedule, options=options)
    for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        options = ("--validation.enable", "--validation.freq", "2", "--validation.steps", "2")
        yield Case("validation", schedule, options=(*options, *none))
    for schedule, csv in (("Interleaved1F1B", "InterleavedZeroBubble"), ("ZBVZeroBubble", "ZB-V")):
        yield Case(f"CSV file of {csv}", schedule, options=none, csv=csv)
    feature = "CSV file of ZB-V with whole backwards"
    yield Case(feature, "ZBVZeroBubble", options=none, csv="ZB-V", is_whole=True)
    replicated = ("--parallelism.data_parallel_replicate_degree", "2", *none)
    for schedule in ("1F1B", *SPLIT):
        yield Case("DDP", schedule, 4, replicated)


def arguments_of(case: Case, assets: Path, num_steps: int) -> list[str]:
    data, tokenizer = assets / "data", assets / "tokenizer"
    base = {
        "--model.name": "llama3",
        "--model.flavor": "debugmodel",
        "--model.hf_assets_path": tokenizer,
        "--training.dataset": "c4_test",
        "--training.dataset_path": data,
        "--validation.dataset": "c4_test",
        "--validation.dataset_path": data,
        "--validation.local_batch_size": 4,
        "--validation.seq_len": 64,
        "--training.local_batch_size": 4,
        "--training.seq_len": 64,
        "--training.steps": num_steps,
        "--training.mixed_precision_param": "float32",
        "--metrics.log_freq": 1,
        "--parallelism.pipeline_parallel_degree": 2,
        "--parallelism.data_parallel_shard_degree": 1,
        "--parallelism.pipeline_parallel_schedule": case.schedule,
        "--debug.seed": 1,  # Pipeline ranks differ, so the model is not that of a single process.
        "--job.dump_folder": assets / "out",
    }
    if case.csv:
        file = assets / f"{case.csv}.csv"
        shape = ["-p", str(case.num_ranks), "-m", "4", "-o", str(file)]
        subprocess.run([sys.executable, "-m", "penstock", "convert", case.csv, *shape], check=True)
        if case.is_whole:
            file.write_text(with_whole_backwards(file.read_text()))
        base["--parallelism.pipeline_parallel_schedule_csv"] = file
    given = [str(part) for item in base.items() for part in item]
    # DualPipeV would overlap expert parallelism by streams of an accelerator.
    return [*given, OVERLAP, *case.options]


def with_whole_backwards(text: str) -> str:
    """Return the text of a CSV file, with whole backwards in place of split ones."""
    rows = [[cell for cell in row.split(",") if "W" not in cell] for row in text.splitlines()]
    return "".join(",".join(row).replace("I", "B") + "\n" for row in rows)


def as_of_0_3(arguments: list[str]) -> list[str]:
    """Return the same arguments for torchtitan 0.3."""
    given = ["--module", "llama3", "--config", "llama3_debugmodel"]
    given.append("--training.disable_cuda_graphs")  # It refuses them with pipelines.
    mode, rest = "", iter(arguments)
    for argument in rest:
        if argument == CHECKPOINT:
            mode = next(rest)
        elif argument in DROPPED:
            next(rest)
        elif argument != OVERLAP:
            given.append(RENAMED.get(argument, argument))
    return [*given, f"activation-checkpoint:{mode}"] if mode else given


def is_0_3(python: str) -> bool:
    """Return whether the Python has torchtitan 0.3 or newer."""
    ask = "from importlib.metadata import version; print(version('torchtitan'))"
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout
    return tuple(map(int, found.split(".")[:2])) >= (0, 3)


def run(python: str, case: Case, arguments: list[str], *, on_penstock: bool) -> list[str]:
    """Return the losses and norms that torchtitan prints, or its error if it fails."""
    plain, error = start(python, case.num_ranks, TRAINER, arguments, on_penstock=on_penstock)
    found = re.findall(r"((?:validate )?step: +\d+ +loss: +[\d.]+(?: +grad_norm: +[\d.]+)?)", plain)
    return [FAILS + error] if error else sorted({" ".join(line.split()) for line in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python that has torchtitan")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="run the cases with one of these in their names")
    parser.add_argument("-o", "--output", type=Path, help="a file for the results, as JSON")
    given = parser.parse_args()
    results = {}
    is_new = is_0_3(given.python)
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        subprocess.run([given.python, "-c", MAKE_ASSETS, folder], check=True, stdout=sys.stderr)
        for case in all_cases():
            if given.only and not any(words in case.name for words in given.only):
                continue
            began_s = time.monotonic()
            arguments = arguments_of(case, assets, given.steps)
            if is_new:
                arguments = as_of_0_3(arguments)
            stock = run(given.python, case, arguments, on_penstock=False)
            own = run(given.python, case, arguments, on_penstock=True)
            results[case.name] = {"torch": stock, "penstock": own}
            took_s = time.monotonic() - began_s
            print(f"{case.name}: {verdict_on(stock, own)} ({took_s:.0f} s)", flush=True)
            if given.output:
                given.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
