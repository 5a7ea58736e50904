"""Measured costs and the schedule that is found while training, over real processes."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from failing_ranks import Explosive, Report, Session, boom, note_failure
from torch import Tensor, nn

import penstock
from auto_training import AutoRun, assert_trained_alike, train_auto
from limits import HANG_S, PROCESS_S
from penstock import CostTable, Pipeline, PipelineStage, Placement
from penstock.runtime.auto.auto_value import Auto
from penstock.solver import SearchResult, search
from stage_training import CPU, Group, rank_in
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

SOON_S = HANG_S / 2  # Ranks that were not told would wait twice as long.
SLOW_S, FAST_S = 0.05, 0.001


@pytest.mark.parametrize(
    "run",
    [
        AutoRun("mlp", (0, 1, 2, 3), 8),
        AutoRun("many", (0, 1, 1, 0)),
        AutoRun("transformer", (0, 1, 0, 1), 3),
    ],
    ids=str,
)
def test_every_step_trains_as_the_unsplit_model(run: AutoRun, pool: WorkerPool) -> None:
    ranks = pool.run(max(run.placement) + 1, train_auto, run)
    assert_trained_alike(run, ranks)
    assert ranks[0].schedules[-1] not in ranks[0].schedules[:2]


class Slow(torch.autograd.Function):
    """An identity whose forward and backward sleep, as real ones do between machines."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class SlowStage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        return Slow.apply(x, self.seconds) + Slow.apply(self.weight, 0.0)


def measure_slow_stages(group: Group) -> CostTable:
    rank = rank_in(group)
    stage = PipelineStage(SlowStage((SLOW_S, FAST_S)[rank]), rank, 2, CPU, group=group)
    x, target = torch.ones(4, 8, requires_grad=True), torch.zeros(4, 8)
    return penstock.measure_costs(
        stage, 4, nn.functional.mse_loss, x, target=target, repeats=2, timeout=HANG_S
    )


def test_waiting_for_a_slow_rank_is_no_cost_of_the_fast_one(pool: WorkerPool) -> None:
    first, second = pool.run(2, measure_slow_stages)
    assert first == second
    for slow_s, fast_s in (first.forward, first.backward_input, first.backward):
        assert slow_s >= SLOW_S
        assert FAST_S <= fast_s < SLOW_S / 2
    assert 0 <= first.delay[0] < SLOW_S / 2
    assert (32.0,) == first.message_bytes


def _train_auto(rank: int, num_ranks: int, *, num_steps: int = 5, **options: Any) -> None:
    placement = Placement.linear(num_ranks)
    stages = [PipelineStage(Explosive(), i, num_ranks, CPU) for i in placement.stages_of(rank)]
    auto = Auto(memory=options.pop("memory", None))
    options = {"loss_fn": nn.functional.mse_loss, "timeout": HANG_S, **options}
    pipeline = Pipeline(stages, auto, num_microbatches=4, **options)
    for _ in range(num_steps):
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))


def _raise_in_search(rank: int, num_ranks: int) -> None:
    with mock.patch(
        "penstock.runtime.auto.next_schedule.search", side_effect=lambda *_, **__: boom("searching")
    ):
        _train_auto(rank, num_ranks)


def _search_for_long(rank: int, num_ranks: int) -> None:
    """Rank 0 takes longer than the others wait."""

    def sleep(*args: Any, **kwargs: Any) -> SearchResult:
        note_failure()
        time.sleep(1.5)
        return search(*args, **kwargs)

    with mock.patch("penstock.runtime.auto.next_schedule.search", side_effect=sleep):
        _train_auto(rank, num_ranks, timeout=1)


def _fit_nothing(rank: int, num_ranks: int) -> None:
    _train_auto(rank, num_ranks, memory=10.0)


def _die_while_searching(rank: int, num_ranks: int) -> None:
    """Tells the test that rank 0 searches, and lets it search until someone has been killed."""

    def tell(*args: Any, **kwargs: Any) -> SearchResult:
        Path(os.environ["PENSTOCK_TEST_FOLDER"], "searching").touch()
        time.sleep(2)
        return search(*args, **kwargs)

    with mock.patch("penstock.runtime.auto.next_schedule.search", side_effect=tell):
        _train_auto(rank, num_ranks)


def _ended_soon(session: Session, name: str, reports: list[Report]) -> None:
    for report in reports:
        assert report.ended_at - session.failed_at(name) < SOON_S


def test_all_ranks_end_if_the_search_fails_or_a_rank_dies_during_it(tmp_path: Path) -> None:
    scenarios = [
        ("nothing fits", _fit_nothing),
        ("raises", _raise_in_search),
        ("late", _search_for_long),
        ("dies", _die_while_searching),
    ]
    with Session(tmp_path, 3, scenarios) as session:
        assert session.comes("searching", PROCESS_S)
        session.signal("dies", 1, 9)
        session.join(PROCESS_S)

        for report in session.reports("nothing fits"):
            assert report.is_a("ScheduleError")
            assert "The smallest memory that fits is" in report.text

        first, *others = session.reports("raises")
        assert first.is_a("Boom")
        for report in others:
            assert report.is_a("CommError")
            assert "stopped waiting for the schedule of the next steps by rank 0" in report.text
            assert "rank 0 failed: Boom: searching" in report.text
        _ended_soon(session, "raises", others)

        for report in session.reports("late")[1:]:
            assert report.is_a("CommError")  # A DeadlineError, unless the other's came first.
            expected = "timed out after 1 s waiting for the schedule of the next steps by rank 0."
            assert expected in report.text

        survivors = [session.report("dies", rank) for rank in (0, 2)]
        assert all(report.is_a("CommError") for report in survivors)
        _ended_soon(session, "dies", survivors)


def test_others_end_if_the_rank_that_searches_dies(tmp_path: Path) -> None:
    with Session(tmp_path, 2, [("dies", _die_while_searching)]) as session:
        assert session.comes("searching", PROCESS_S)
        session.signal("dies", 0, 9)
        session.join(PROCESS_S)
        report = session.report("dies", 1)
        assert report.is_a("CommError")
        assert "stopped waiting for the schedule of the next steps by rank 0" in report.text
        _ended_soon(session, "dies", [report])
