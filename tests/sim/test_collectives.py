"""When gathers and reductions run, which computes wait for them, and what they hold."""

import pytest

from penstock import CostTable, Schedule, schedules, simulate
from penstock.passes import Gathers, add_gathers
from penstock.timeline import Report

# F, I and W take 1 each, B takes 2.
ONE_RANK = "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1RESHARD,0B0,0RESHARD,1REDUCE_GRAD,0REDUCE_GRAD\n"


def run(text: str, *, blocking: bool = False, **costs: float | list[float]) -> Report:
    schedule = Schedule.from_csv(text)
    num_stages = schedule.num_stages
    table = CostTable(
        forward=[1.0] * num_stages,
        backward_input=[1.0] * num_stages,
        backward_weight=[1.0] * num_stages,
        **costs,  # type: ignore[arg-type]
    )
    return simulate(schedule, table, blocking=blocking)


def times(report: Report) -> dict[str, tuple[float, float]]:
    return {str(timed.action): (timed.start, timed.end) for timed in report.actions()}


def test_compute_waits_for_its_own_gather_and_for_no_other() -> None:
    found = times(run("0UNSHARD,1UNSHARD,0F0,0F1,1F0,1F1\n", gather=[0.5, 2.5]))
    assert (0.0, 0.5) == found["0UNSHARD"]
    assert (0.5, 3.0) == found["1UNSHARD"]  # One collective after another.
    assert (0.5, 1.5) == found["0F0"]
    assert (1.5, 2.5) == found["0F1"]
    assert (3.0, 4.0) == found["1F0"]


def test_gather_is_issued_when_the_rank_reaches_it() -> None:
    found = times(run("0F0,1UNSHARD,0F1,1F0,1F1\n", gather=[0.0, 0.75]))
    assert (1.0, 1.75) == found["1UNSHARD"]  # While 0F1 runs, so that nothing waits.
    assert (1.0, 2.0) == found["0F1"]
    assert (2.0, 3.0) == found["1F0"]


def test_gather_does_not_wait_for_the_message_that_the_next_compute_waits_for() -> None:
    found = times(run("0F0\n1UNSHARD,1F0\n", gather=[0.0, 1.5]))
    assert (0.0, 1.5) == found["1UNSHARD"]
    assert (1.5, 2.5) == found["1F0"]


def test_weight_backward_does_not_wait_for_a_gather() -> None:
    text = "0UNSHARD,0F0,0F1,0I0,0RESHARD,0UNSHARD,0W0,0I1,0W1,0RESHARD\n"
    found = times(run(text, gather=[1.5]))
    assert (4.5, 5.5) == found["0W0"]
    assert (6.0, 7.0) == found["0I1"]


def test_overlap_waits_for_both_of_its_stages() -> None:
    late = "0UNSHARD,0F0,1UNSHARD,1F0,1RESHARD,1UNSHARD,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1\n"
    # The first gather of stage 1 ends at 4, 1F0 at 5, and the second gather at 8.
    assert (8.0, 11.0) == times(run(late, gather=[0, 3]))["(0F1;1B0)OVERLAP_F_B"]
    late = "0UNSHARD,0F0,1UNSHARD,1F0,0RESHARD,0UNSHARD,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1\n"
    assert (8.0, 11.0) == times(run(late, gather=[3, 0]))["(0F1;1B0)OVERLAP_F_B"]


def test_step_ends_with_the_last_reduction_which_is_not_busy_time() -> None:
    report = run(ONE_RANK, gather=[0.5, 0.5], reduce=[1.0, 4.0])
    found = times(report)
    assert (7.0, 11.0) == found["1REDUCE_GRAD"]
    assert (11.0, 12.0) == found["0REDUCE_GRAD"]
    assert 12.0 == report.makespan
    [rank] = report.ranks
    assert 6.0 == rank.busy
    assert (1.0, 0.0, 5.0) == (rank.idle.warm_up, rank.idle.steady, rank.idle.cool_down)
    assert 0.5 == report.bubble_by_makespan


def test_makespan_counts_a_collective_that_outlasts_the_actions_after_it() -> None:
    text = "0F0,0F1,1F0,1F1,1B0,1B1,1REDUCE_GRAD,0B0,0B1\n"
    report = run(text, reduce=[0.0, 7.0])
    assert (8.0, 15.0) == times(report)["1REDUCE_GRAD"]
    assert 15.0 == report.makespan == report.span == report.ranks[0].last_end


def test_span_begins_with_the_gather_that_the_first_compute_waits_for() -> None:
    """A rank that waits for its first message could gather right before it arrives."""
    report = run("0UNSHARD,0F0\n1UNSHARD,1F0\n", gather=[0.25, 0.5])
    assert (0.0, 0.75) == tuple(rank.first_start for rank in report.ranks)
    assert (1.25, 1.5) == tuple(rank.span for rank in report.ranks)
    # What is gathered ahead for later computes is not waited for.
    report = run("0UNSHARD,1UNSHARD,0F0,1F0\n", gather=[0.25, 0.5])
    assert 0.0 == report.ranks[0].first_start
    assert 0.25 == times(report)["0F0"][0]


def test_blocking_collectives_keep_the_rank_from_computing() -> None:
    report = run(ONE_RANK, blocking=True, gather=[0.5, 0.5], reduce=[1.0, 4.0])
    found = times(report)
    assert (0.5, 1.5) == found["0F0"]
    assert (1.5, 2.0) == found["1UNSHARD"]
    assert (2.0, 3.0) == found["1F0"]
    assert (7.0, 11.0) == found["1REDUCE_GRAD"]
    assert (11.0, 12.0) == found["0REDUCE_GRAD"]
    assert 6.0 == report.ranks[0].busy
    assert 12.0 == report.makespan


def test_gathered_parameters_are_held_from_the_start_of_the_gather_to_the_free() -> None:
    report = run(ONE_RANK, gather=[0.5, 0.5], gathered=[10.0, 20.0])
    assert [
        (0.0, 0.0),
        (0.0, 10.0),
        (0.5, 11.0),
        (1.5, 31.0),
        (2.0, 32.0),
        (5.0, 31.0),
        (5.0, 11.0),
        (7.0, 10.0),
        (7.0, 0.0),
    ] == report.memory(0)
    assert 32.0 == report.peak_memory == report.ranks[0].peak_memory


def test_gather_that_waits_for_another_holds_nothing_yet() -> None:
    report = run("0UNSHARD,1UNSHARD,0F0,0RESHARD,1F0,1RESHARD\n", gather=[2, 9], gathered=[5, 7])
    curve = report.memory(0)
    assert [0.0, 0.0, 2.0, 2.0] == [point.time for point in curve[:4]]
    assert [0.0, 5.0, 12.0, 13.0] == [point.held for point in curve[:4]]
    assert 0.0 == curve[-1].held


def test_free_of_a_gather_that_nothing_used_waits_for_it() -> None:
    report = run("0UNSHARD,0RESHARD,0UNSHARD,0F0,0RESHARD\n", gather=[2.0])
    assert [0.0, 2.0, 2.0, 4.0, 5.0] == [timed.start for timed in report.actions()]


def test_cap_counts_gathered_parameters() -> None:
    schedule = Schedule.from_csv(ONE_RANK)
    costs = CostTable.uniform(2, gathered=3.0)
    schedule.verify(costs=costs, memory=8.0)
    with pytest.raises(ValueError, match="the rank holds 8, but its memory is 7"):
        schedule.verify(costs=costs, memory=7.0)


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "Interleaved1F1B", "DualPipeV"])
def test_gathers_that_take_nothing_change_nothing(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    for policy in (Gathers.once(), Gathers.per_need(), Gathers.at_most(2)):
        gathered = simulate(add_gathers(schedule, policy))
        plain = simulate(schedule)
        assert plain.ranks == gathered.ranks
        assert [plain.memory(rank) for rank in range(4)] == [
            gathered.memory(rank) for rank in range(4)
        ]
