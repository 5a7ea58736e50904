"""The cases of mesh_training.py with the classes of torch.distributed.pipelining."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn

from mesh_training import NUM_MICROBATCHES, WRAPPINGS, Case, Found, Meshes, run_case

TORCH_CLASSES: dict[str, tuple[Any, int, str]] = {
    "GPipe": (torch_pipelining.ScheduleGPipe, 1, "linear"),
    "1F1B": (torch_pipelining.Schedule1F1B, 1, "linear"),
    "Interleaved1F1B": (torch_pipelining.ScheduleInterleaved1F1B, 2, "loop"),
    "LoopedBFS": (torch_pipelining.ScheduleLoopedBFS, 2, "loop"),
    "InterleavedZeroBubble": (torch_pipelining.ScheduleInterleavedZeroBubble, 2, "loop"),
    "ZB-V": (torch_pipelining.ScheduleZBVZeroBubble, 2, "v"),
    "DualPipeV": (torch_pipelining.ScheduleDualPipeV, 2, "v"),
}


def torch_step(
    case: Case, modules: list[nn.Sequential], meshes: Meshes
) -> tuple[dict[int, nn.Module], Callable[..., object]]:
    """Wrap the stages of this process, and run them with torch's own classes."""
    schedule_class, per_rank, shape = TORCH_CLASSES[case.schedule]
    rank = meshes["pp"].get_local_rank()
    num_stages = 2 * per_rank
    held = {
        "linear": [rank],
        "loop": [rank, rank + 2],
        "v": [rank, num_stages - 1 - rank],
    }[shape]
    own = {stage: WRAPPINGS[case.wrapping].wrap(modules[stage], meshes) for stage in held}
    group = meshes["pp"].get_group()
    stages = [
        torch_pipelining.PipelineStage(
            module,
            stage,
            num_stages,
            "cpu",
            group=group,
            get_mesh=lambda names, _: meshes[names],
        )
        for stage, module in own.items()
    ]
    schedule = schedule_class(
        stages[0] if per_rank == 1 else stages,
        NUM_MICROBATCHES,
        loss_fn=WRAPPINGS[case.wrapping].loss_fn,
    )

    def step(x: Any, *, target: Any) -> None:
        args = (x,) if 0 in own else ()
        schedule.step(*args, target=target if num_stages - 1 in own else None)

    return own, step


def run_torch_on_rank(_: dist.ProcessGroup, case: Case) -> Found:
    """Run a case with torch's classes on a worker."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_case(case, torch_step)
