"""Each process profiles its own rank: messages, gathers, reductions and tied gradients."""

import pytest
import torch.distributed as dist
from sharded_nets import make_batch, make_rank, own_half
from torch.profiler import ProfilerActivity, profile

from limits import HANG_S
from local_steps import mean_square
from penstock import Pipeline, schedules
from penstock.passes import Gathers, add_gathers
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


def profile_own(_: dist.ProcessGroup) -> list[str]:
    rank = make_rank(["fsdp"] * 4, is_tied=True)
    schedule = schedules.get("ZB-V")(num_ranks=2, num_microbatches=4)
    rank.pipeline.close()
    pipeline = Pipeline(
        rank.stages, add_gathers(schedule, Gathers.once()), loss_fn=mean_square, timeout=HANG_S
    )
    x, target = (own_half(rank, values) for values in make_batch())
    pipeline.step(x, target=target)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        pipeline.step(x, target=target)
    return [row.key for row in prof.key_averages() for _ in range(row.count)]


def test_ranges_of_sharded_stages_on_processes(pool: WorkerPool) -> None:
    for number, names in enumerate(pool.run(4, profile_own)):
        stages = [0, 3] if number < 2 else [1, 2]
        expected = [
            f"{letter} stage {stage} microbatch {mb}"
            for stage in stages
            for letter in "FIW"
            for mb in range(4)
        ]
        assert set(expected) <= set(names)
        for kind in ("gather", "free", "reduce"):
            found = {name for name in names if name.startswith(f"{kind} stage")}
            assert {f"{kind} stage {stage}" for stage in stages} == found
        assert (0 in stages) == ("exchange tied gradients" in names)
        assert "wait for the end of all reductions" in names
        edges = [(0, 1), (3, 2)] if stages == [1, 2] else [(1, 0), (2, 3)]
        for maker, taker in edges:
            kind = "activation" if maker < taker else "gradient"
            assert f"wait for {kind} stage {maker} to {taker} microbatch 3" in names
            kind = "gradient" if maker < taker else "activation"
            assert f"send {kind} stage {taker} to {maker} microbatch 3" in names
