"""Time steps of stages that FSDP2 shards, beside torch's classes with the same wrapping."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from contenders import SWITCH, quartiles
from processes import environment, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import penstock

NUM_MICROBATCHES, ROWS, TOKENS = 8, 2, 64
TORCH, PENSTOCK = "torch", "penstock over gloo"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_stage(index: int, width: int, mesh: DeviceMesh, *, frees: bool) -> nn.Module:
    torch.manual_seed(index)
    module = nn.Sequential(Block(width), Block(width))
    for block in module:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=frees)
    return fully_shard(module, mesh=mesh["dp"], reshard_after_forward=frees)


def make_step(library: str, width: int, mesh: DeviceMesh, *, frees: bool) -> Any:
    """Return what runs a step of ZB-V, and the modules of this process."""
    rank = mesh["pp"].get_local_rank()
    own = {index: make_stage(index, width, mesh, frees=frees) for index in (rank, 3 - rank)}
    group = mesh["pp"].get_group()
    if library == PENSTOCK:
        stages = [penstock.PipelineStage(m, i, 4, "cpu", group=group) for i, m in own.items()]
        made = penstock.schedules.get("ZB-V")(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
        return penstock.Pipeline(stages, made, loss_fn=nn.functional.mse_loss).step, own
    torch_stages = [
        torch_pipelining.PipelineStage(m, i, 4, torch.device("cpu"), group=group)
        for i, m in own.items()
    ]
    schedule = torch_pipelining.ScheduleZBVZeroBubble(
        torch_stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )

    def step(x: Tensor, *, target: Tensor) -> Any:
        return schedule.step(x, target=target) if rank == 0 else schedule.step()

    return step, own


def count(step: Any, x: Tensor, target: Tensor) -> tuple[int, int]:
    """Return the gathers and reductions of one step on this process."""
    counts = [0, 0]
    originals = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce

    def counted(number: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[number] += 1
            return originals[number](*args, **kwargs)

        return call

    _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = map(counted, (0, 1))
    try:
        step(x, target=target)
    finally:
        _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = originals
    return counts[0], counts[1]


def measure(width: int, rounds: int, frees: bool) -> dict[str, Any]:
    os.environ[SWITCH] = "0"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    made = {name: make_step(name, width, mesh, frees=frees) for name in (TORCH, PENSTOCK)}
    torch.manual_seed(100)
    x, target = torch.randn(2, NUM_MICROBATCHES * ROWS, TOKENS, width)
    times_s: dict[str, list[float]] = {name: [] for name in made}
    found: dict[str, Any] = {}
    for name, (step, _) in made.items():
        step(x, target=target)
        found[name] = dict(zip(("gathers", "reductions"), count(step, x, target), strict=True))
    for number in range(rounds):
        for name in made if number % 2 else reversed(list(made)):
            step, own = made[name]
            for module in own.values():
                module.zero_grad()
            dist.barrier()
            began_s = time.perf_counter()
            step(x, target=target)
            dist.barrier()
            times_s[name].append(time.perf_counter() - began_s)
    for name in made:
        found[name]["step_s"] = quartiles(times_s[name])
    ratios = [t / p for t, p in zip(times_s[TORCH], times_s[PENSTOCK], strict=True)]
    found["torch_over_penstock"] = quartiles(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, the small width only")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    rounds = 5 if options.quick else 25
    record: dict[str, Any] = {"environment": environment(), "rounds": rounds, "sizes": []}
    for width in (64,) if options.quick else (64, 256):
        for frees in (False, True):
            found = run_ranks(measure, 4, width, rounds, frees, timeout_s=900)
            record["sizes"].append({"width": width, "reshard_after_forward": frees, **found})
            low, ratio, high = found["torch_over_penstock"]
            print(f"width {width}, reshard_after_forward={frees}:", end=" ")
            print(f"torch ÷ ours {ratio:.2f} [{low:.2f}-{high:.2f}],", end=" ")
            for name in (TORCH, PENSTOCK):
                each = found[name]
                print(
                    f"{name} {each['step_s'][1] * 1e3:.1f} ms, {each['gathers']} gathers and "
                    f"{each['reductions']} reductions;",
                    end=" ",
                )
            print(flush=True)
    if options.save:
        options.save.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
