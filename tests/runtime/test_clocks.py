"""Clocks of ranks are compared by asking, over the pipeline's own channels."""

import time

import pytest
import torch

import penstock
from penstock import LocalGroup
from penstock.runtime.clocks import seconds_ahead


def test_clock_that_is_ahead_is_found_out() -> None:
    """Each rank reads a clock of its own, as on another machine; no answer takes five seconds."""

    def on_rank(group: LocalGroup) -> float:
        def clock() -> float:
            return time.perf_counter() + 1000.0 * group.rank

        return seconds_ahead(group.connect(), torch.device("cpu"), clock)

    assert [0, 1000, 2000] == pytest.approx(penstock.local_ranks(3, on_rank), abs=5)


def test_one_rank_is_not_ahead_of_itself() -> None:
    def on_rank(group: LocalGroup) -> float:
        return seconds_ahead(group.connect(), torch.device("cpu"))

    assert [0] == penstock.local_ranks(1, on_rank)
