"""Every schedule over an imitation of NCCL, whose communicators block at their first use."""

from collections.abc import Callable, Iterable

import pytest

from bare_steps import run_bare_steps
from fuzzing import IS_LONG
from imitated_nccl import ImitatedComm, Pairs
from penstock import LocalGroup, Schedule, local_ranks, schedules
from penstock.comm.links import PairLink
from penstock.errors import CommError
from penstock.ir.message import Channel
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.program import make_program
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes

RANKS = range(1, 9) if IS_LONG else (1, 2, 3, 5, 8)
# Fewer than there are ranks, as many, twice as many, and numbers that they do not divide.
MICROBATCHES = range(1, 17) if IS_LONG else (1, 5, 8)
STAGES_PER_RANK = (1, 2, 3) if IS_LONG else (2,)
every_schedule = pytest.mark.parametrize("generator", REGISTRY, ids=lambda made: made.name)
Open = Callable[[ImitatedComm, Iterable[Channel]], None]


def open_as_one(comm: ImitatedComm, channels: Iterable[Channel]) -> None:
    comm.open(channels)


def open_sends_first(comm: ImitatedComm, channels: Iterable[Channel]) -> None:
    """A mutant: each rank has an order of its own."""
    for channel in sorted(channels, key=lambda channel: (channel.sender != comm.rank, channel)):
        comm.open([channel])


def run(schedule: Schedule, open_channels: Open = open_as_one) -> list[int]:
    """Run steps of all ranks; returns how many communicators each has made."""
    pairs: Pairs = {}

    def main(group: LocalGroup) -> int:
        comm = ImitatedComm(group, pairs)
        open_channels(comm, make_program(schedule, comm.rank).channels)
        run_bare_steps(comm, schedule)
        return len(comm.ends)

    return local_ranks(schedule.num_ranks, main)


@pytest.mark.fuzz
@every_schedule
def test_steps_and_evaluations_end(generator: schedules.Generator) -> None:
    grid = shapes(
        generator, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=STAGES_PER_RANK
    )
    for shape in grid:
        run(make(generator, shape))


@pytest.mark.parametrize("name", schedules.names())
def test_channels_are_those_that_messages_take(name: str) -> None:
    """None is missing, or a message would be refused; and none is there in vain."""
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    for orders in (schedule, keep_forwards(schedule)):
        used: Pairs = {}

        def main(group: LocalGroup, orders: Schedule = orders, used: Pairs = used) -> None:
            comm = ImitatedComm(group, used)
            comm.open(make_program(orders, comm.rank).channels)
            run_bare_steps(comm, orders)

        local_ranks(4, main)
        named = [make_program(orders, rank).channels for rank in range(4)]
        assert used.keys() == frozenset().union(*named)
        assert all(pair.num_delivered > 1 for pair in used.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("1F1B", [2, *[4] * 62, 2]), ("ZB-V", [2, *[4] * 62, 2]), ("Interleaved1F1B", [4] * 64)],
)
def test_rank_among_many_has_communicators_for_its_neighbours_only(
    name: str, expected: list[int]
) -> None:
    """Two for each neighbour; in a loop the first and the last rank are neighbours too."""
    schedule = schedules.get(name)(num_ranks=64, num_microbatches=2)
    pairs: Pairs = {}

    def main(group: LocalGroup) -> int:
        comm = ImitatedComm(group, pairs)
        comm.open(make_program(schedule, comm.rank).channels)
        return len(comm.ends)

    assert expected == local_ranks(64, main)


def test_stage_that_never_runs_backward_has_no_way_back() -> None:
    schedule = schedules.get("ForwardOnly")(num_ranks=4, num_microbatches=4)
    assert [1, 2, 2, 1] == run(schedule)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-V"])
def test_ranks_that_open_in_orders_of_their_own_are_found_out(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    with pytest.raises(CommError, match="no rank can go on: rank 0 waits for a first use of 0 to"):
        run(schedule, open_sends_first)


def test_channels_that_connect_at_their_first_message_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups used to connect at their first message: rank 0 waited for rank 2 to take its first
    gradient, rank 2 for an activation of rank 1, and rank 1 for one of rank 0."""

    def make_group(self: PairLink, channel: Channel, timeout_s: float) -> None:
        self._groups[channel] = self._make_pair(channel)

    monkeypatch.setattr(PairLink, "connect", make_group)
    run(schedules.get("1F1B")(num_ranks=3, num_microbatches=5))  # Not every schedule shows it.
    schedule = schedules.get("InterleavedZeroBubble")(num_ranks=3, num_microbatches=5)
    with pytest.raises(
        CommError, match="no rank can go on: rank 0 waits for a first use of 0 to 2"
    ):
        run(schedule)
