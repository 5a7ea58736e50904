"""Ranks and links that have become slower than planned: who is named, and when."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from local_steps import mean_square, mlp, mlp_batch
from penstock import Auto, CostTable, LocalGroup, Pipeline, local_ranks, schedules, simulate
from penstock.costs import EdgeCost
from penstock.errors import AgreementError, StageError
from penstock.ir import Backward, Forward
from penstock.runtime.auto.seen_work import UNKNOWN, SeenWork
from penstock.runtime.auto.slow_watch import WINDOW, SlowWatch, Verdict
from penstock.runtime.measuring.message_times import Edge
from penstock.runtime.measuring.slowness import Plan
from stage_training import make_stages

NUM_RANKS, NUM_MICROBATCHES = 3, 4
SCHEDULE = schedules.get("1F1B")(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
COSTS = CostTable(
    forward=[0.01] * 3, backward_input=[0.01] * 3, backward_weight=[0.01] * 3, delay=0.001
)
CPU = torch.device("cpu")


def meter_of(rank: int, factor: float = 1.0, step_s: float = 0.186) -> Any:
    """Return a meter of a step in which the forwards of a rank take `factor` as long."""
    costs = {Forward: 0.01 * factor, Backward: 0.02}
    timings = {
        kind(rank, mb): SimpleNamespace(cost_s=lambda _, cost_s=cost_s: cost_s)
        for kind, cost_s in costs.items()
        for mb in range(NUM_MICROBATCHES)
    }
    return SimpleNamespace(timings=timings, began_s=0.0, ended_s=step_s)


def watch_steps(
    steps: Sequence[dict[int, float]],
    *,
    step_s: float = 0.186,
    edges: dict[int, Edge] | None = None,
    seen: SeenWork = UNKNOWN,
    work: Sequence[float] = (),
) -> list[Verdict | None]:
    """Return what rank 0 finds after each step, in which some ranks are slower by a factor."""

    def main(group: LocalGroup) -> list[Verdict | None]:
        comm = group.connect()
        watch = SlowWatch(Plan(SCHEDULE, COSTS, {}), 0.5, 0.186, seen)
        return [
            watch.take(meter_of(comm.rank, slow.get(comm.rank, 1.0), step_s), work, comm, CPU, {})
            for slow in steps
        ]

    measured = "penstock.runtime.auto.slow_watch.measure_edges"
    with mock.patch(measured, return_value=edges or {}) as measure:
        found, *others = local_ranks(NUM_RANKS, main)
    assert all(found == other for other in others)
    assert bool(edges) == measure.called
    return found


def test_slow_rank_is_named_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    *before, verdict = watch_steps([{1: 2.1}] * WINDOW)
    assert [None] * (WINDOW - 1) == before
    assert verdict is not None
    assert [1] == list(verdict.slow)
    assert pytest.approx(11 / 30, rel=1e-9) == verdict.drift
    (line,) = [record.getMessage() for record in caplog.records]
    assert "takes 2.1 times as long as planned in the forwards of stage 1; the step takes" in line
    assert line.startswith("rank 1 (host ")
    slower = replace(COSTS, forward=(0.01, 0.021, 0.01))
    step_s, now_s = (simulate(SCHEDULE, costs).makespan for costs in (COSTS, slower))
    assert pytest.approx(now_s - step_s, rel=1e-9) == verdict.slow[1].lost_s
    assert line.endswith(f"{now_s / step_s - 1:.0%} longer ({(now_s - step_s) * 1e3:.4g} ms)")


def test_one_slow_step_of_a_window_is_no_reason_for_suspicion() -> None:
    assert not watch_steps([{1: 5.0}, {}, {}])[-1].slow  # type: ignore[union-attr]


def test_rank_within_the_share_is_not_named() -> None:
    assert not watch_steps([{1: 1.4}] * WINDOW)[-1].slow  # type: ignore[union-attr]


def test_what_costs_less_than_a_millisecond_is_not_named() -> None:
    with mock.patch("penstock.runtime.measuring.slowness.LEAST_S", 0.05):
        assert not watch_steps([{1: 2.0}] * WINDOW)[-1].slow  # type: ignore[union-attr]


def test_rank_is_named_once_and_again_when_it_has_recovered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    watch_steps([{1: 2.0}] * (2 * WINDOW) + [{}] * WINDOW)
    slow, again = [record.getMessage() for record in caplog.records]
    assert "times as long as planned" in slow
    assert again.startswith("rank 1 (host ")
    assert again.endswith("is as fast as planned again")


def test_longer_step_that_a_rank_explains_is_not_a_reason_to_time_messages() -> None:
    (*_, verdict) = watch_steps([{1: 5.0}] * WINDOW, step_s=0.186 + 0.16)
    assert verdict is not None
    assert not verdict.asks_for_links


def test_slow_link_is_named_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    edges = {0: Edge(EdgeCost(0.001, 8), 0.0), 1: Edge(EdgeCost(0.101, 8), 0.0)}
    (*_, verdict) = watch_steps([{}] * WINDOW, step_s=0.6, edges=edges)
    assert verdict is not None
    assert verdict.has_slow_link
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the link between rank 1 (host ")
    assert "takes 101 ms for a message between stages 1 and 2, 1 ms as planned; the step" in line


def test_steps_with_more_work_are_not_slow() -> None:
    seen = SeenWork.of([[1.0, 2.0, 3.0]])
    (*_, verdict) = watch_steps([{}] * WINDOW, seen=seen, work=[2.0] * 4)
    assert verdict is not None
    assert 0.0 == verdict.drift
    (*_, verdict) = watch_steps([{}] * WINDOW, seen=seen, work=[1.0] * 4)
    assert verdict is not None
    assert 1.0 == verdict.drift


class _Slowing(nn.Module):
    """A layer whose forward sleeps from its n-th call on."""

    def __init__(self, layer: nn.Module, after: int) -> None:
        super().__init__()
        self.layer, self.after, self.num_calls = layer, after, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > self.after:
            time.sleep(0.02)
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_rank_of_a_given_schedule_is_compared_with_its_first_steps(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Stage 1 sleeps from its 11th step on; 7 steps make the plan, and looks end at 26 and 42."""
    modules, batch = mlp(2), mlp_batch()
    modules[1] = _Slowing(modules[1], after=4 * 10)

    def main(group: LocalGroup) -> list[int]:
        stages = make_stages(group, modules, [group.rank])
        pipeline = Pipeline(stages, name, num_microbatches=4, loss_fn=mean_square, slow_when=3.0)
        named = []
        for step in range(1, 27):
            pipeline.step(*batch.args, target=batch.target)
            if any("rank 1 (host" in record.getMessage() for record in caplog.records):
                named.append(step)
        return named

    assert [26] == local_ranks(2, main)[0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "times as long as planned in the forwards of stage 1; the step takes" in line


@pytest.mark.parametrize(
    ("schedule", "loss_fn", "slow_when", "expected"),
    [
        ("1F1B", mean_square, -1, "slow_when is -1. Expected a share such as 0.5"),
        ("1F1B", None, 0.5, "slow_when is 0.5, but there is no loss_fn, or no backward"),
        ("auto", mean_square, 0.5, r"slow_when is 0.5, but the schedule is found while training"),
        (Auto(), mean_square, 0.5, r"Give it there: schedule=Auto\(slow_when=…\)"),
    ],
)
def test_share_that_is_wrong_or_would_be_ignored_is_rejected(
    schedule: Any, loss_fn: Any, slow_when: float, expected: str
) -> None:
    def main(group: LocalGroup) -> None:
        stages = make_stages(group, mlp(1), [0])
        Pipeline(stages, schedule, num_microbatches=4, loss_fn=loss_fn, slow_when=slow_when)

    with pytest.raises(StageError, match=expected):
        local_ranks(1, main)


def test_ranks_that_watch_differently_are_rejected() -> None:
    modules, batch = mlp(2), mlp_batch()

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [group.rank])
        share = None if group.rank == 0 else 0.5
        Pipeline(stages, "1F1B", num_microbatches=4, loss_fn=mean_square, slow_when=share).step(
            *batch.args, target=batch.target
        )

    with pytest.raises(AgreementError, match=r"disagree on slow_when \(rank 0: None; rank 1: 0.5"):
        local_ranks(2, main)
