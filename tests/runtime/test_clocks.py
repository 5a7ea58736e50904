"""Clocks of ranks are compared by asking, over the pipeline's own channels."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import penstock
from local_steps import FOUR_STAGES, mean_square, mlp, mlp_batch
from penstock import LocalGroup, Pipeline
from penstock.ir import Rank
from penstock.runtime.recording.clocks import seconds_ahead
from stage_training import make_stages

CPU = torch.device("cpu")


class Clocks:
    """A clock for each rank, told apart by their threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clocks: dict[int, Iterator[float]] = {}
        monkeypatch.setattr("time.perf_counter", self._read)

    def run(
        self,
        num_ranks: int,
        clock_of: Callable[[Rank], Iterator[float]],
        main: Callable[[LocalGroup], Any],
    ) -> list[Any]:
        def on_rank(group: LocalGroup) -> Any:
            self._clocks[threading.get_ident()] = clock_of(group.rank)
            return main(group)

        return penstock.local_ranks(num_ranks, on_rank)

    def _read(self) -> float:
        return next(self._clocks[threading.get_ident()])


def measure(group: LocalGroup) -> float:
    return seconds_ahead(group.connect(), CPU)


def test_offset_is_that_of_the_quickest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks at 0, 100, 200 …; the answer takes 50 in all rounds but the fourth."""

    def clock_of(rank: Rank) -> Iterator[float]:
        for number in itertools.count():
            began, took = 100.0 * number, 6.0 if number == 3 else 50.0
            if rank == 0:
                yield began
                yield began + took
            else:  # In the middle of the quick round, and late in the others.
                yield 7000 + began + (3 if number == 3 else 45)

    assert [0, 7000] == Clocks(monkeypatch).run(2, clock_of, measure)


def test_one_rank_is_not_ahead_of_itself() -> None:
    assert [0] == penstock.local_ranks(1, measure)


def test_recording_of_ranks_with_other_clocks_has_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every reading of a clock takes a second; those of two ranks are a million apart."""
    modules, batch, schedule = mlp(), mlp_batch(), FOUR_STAGES["ZB-V"]

    def clock_of(rank: Rank) -> Iterator[float]:
        return map(float, itertools.count(1_000_000 * rank))

    def main(group: LocalGroup) -> float:
        stages = make_stages(group, modules, schedule.placement.stages_of(group.rank))
        pipeline = Pipeline(stages, schedule, loss_fn=mean_square, record=True)
        pipeline.step(*batch.args, target=batch.target)
        return pipeline.recording().typical().makespan

    first, second = Clocks(monkeypatch).run(2, clock_of, main)
    assert first == second
    # A step reads the clock some hundred times on each rank.
    assert first < 1000
