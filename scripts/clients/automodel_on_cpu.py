"""Train a small Llama of transformers by NeMo Automodel's AutoPipeline; print losses and norms.

    torchrun --nproc-per-node 2 scripts/clients/automodel_on_cpu.py SCHEDULE GROWS none
    torchrun --nproc-per-node 4 scripts/clients/automodel_on_cpu.py SCHEDULE GROWS fsdp|tp

If GROWS is 1, each step has longer sequences. With fsdp or tp, Automodel's parallelizer shards the
stages over 2 processes: with fsdp each of them has its own batches.
The file knows nothing of Penstock. compare_automodel.py starts it.
"""

import sys
from typing import Any

import torch
import transformers
from nemo_automodel.components.distributed.config import FSDP2Config
from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional

WORDS, LENGTH, SIZE, NUM_STEPS = 61, 8, 4, 3


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if isinstance(logits, DTensor):  # As Automodel's own losses do.
        logits = logits.full_tensor()
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=WORDS,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the norm of a gradient that may be sharded."""
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).norm()


def main(schedule: str, grows: bool, feature: str) -> None:
    torch.distributed.init_process_group("gloo")
    sizes = ParallelismSizes(pp_size=2, tp_size=2 if feature == "tp" else 1)
    context = MeshContext.build(FSDP2Config(mp_policy=MixedPrecisionPolicy()), sizes)
    mesh = context.device_mesh

    def parallelize(part: nn.Module, **_: Any) -> None:
        parallelize_model(part, context)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean.

    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_schedule=schedule,
        pp_microbatch_size=1,
        pp_batch_size=SIZE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        **context.pipeline_axis_kwargs(),
    ).build(
        make_model(), loss_fn=loss_fn, parallelize_fn=None if feature == "none" else parallelize
    )
    parameters = [p for part in pipeline.parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(NUM_STEPS):
        length = LENGTH + step * grows
        seed = 10 * step + mesh["dp_shard"].get_local_rank()
        words = torch.randint(WORDS, (SIZE, length), generator=torch.Generator().manual_seed(seed))
        if grows:
            pipeline.update_seq_len(length)
        has_last = pipeline.info.has_last_stage
        losses: list[torch.Tensor] | None = [] if has_last else None
        args = (words,) if pipeline.info.has_first_stage else ()
        target = words.roll(-1, 1) if has_last else None
        pipeline.info.schedule.step(*args, target=target, losses=losses)
        norm = torch.stack([norm_of(p.grad) for p in parameters if p.grad is not None]).norm()
        loss = f" loss {torch.stack(losses).mean().item():.7f}" if losses else ""
        rank = torch.distributed.get_rank()
        sys.stdout.write(f"rank {rank} step {step} norm {norm.item():.7f}{loss}\n")
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", sys.argv[3])
