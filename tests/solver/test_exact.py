"""The exact solver: as good as the best of all orders, within the caps, and what is rejected."""

import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest

from limits import HANG_S
from penstock import CostTable, Placement, Schedule, schedules, simulate
from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
)
from penstock.passes import add_comms, verify
from penstock.solver import Problem
from penstock.solver.exact import ExactProgress, print_progress, solve
from penstock.solver.exact.incumbent import Incumbent
from penstock.solver.exact.ticks import to_ticks
from penstock.solver.exact.whole_units import to_units
from penstock.solver.safe_schedules import one_at_a_time

# p ranks, m microbatches; f, i, w, c: the times of F, I, W and of a message.


# Brute force: every order of every rank, in any order of the microbatches.


def all_orders(stages: Sequence[int], m: int) -> Iterator[tuple[Action, ...]]:
    """Every order of a rank in which each action comes after those of its own microbatch."""

    def grow(done: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        options = [action for action in everything if can_follow(action, done)]
        if not options:
            yield done
        for action in options:
            yield from grow((*done, action))

    def can_follow(action: Action, done: tuple[Action, ...]) -> bool:
        if action in done:
            return False
        match action:
            case Forward(stage, mb):
                return all(Forward(s, mb) in done for s in stages if s < stage)
            case BackwardWeight(stage, mb):
                return BackwardInput(stage, mb) in done
            case Backward(stage, mb) | BackwardInput(stage, mb):
                is_done = {Backward(stage, mb), BackwardInput(stage, mb)} & set(done)
                forwards = all(Forward(s, mb) in done for s in stages)
                later = all(
                    {Backward(s, mb), BackwardInput(s, mb)} & set(done) for s in stages if s > stage
                )
                return not is_done and forwards and later
        raise AssertionError(action)

    kinds = (Forward, Backward, BackwardInput, BackwardWeight)
    everything: list[Any] = [kind(s, mb) for kind in kinds for s in stages for mb in range(m)]
    return grow(())


def all_schedules(placement: Placement, m: int) -> list[Schedule]:
    """Every schedule that can be run."""
    found = []
    ranks = [list(all_orders(placement.stages_of(r), m)) for r in range(placement.num_ranks)]
    for orders in product(*ranks):
        schedule = Schedule(orders, placement, m)
        with suppress(ScheduleError):
            verify(schedule)
            found.append(schedule)
    return found


@pytest.fixture(scope="module")
def two_by_two() -> list[Schedule]:
    return all_schedules(Placement.linear(2), 2)


def least(
    found: list[Schedule], costs: CostTable, caps: Sequence[float], clock: str = "makespan"
) -> float:
    """The least time of the schedules that keep to the caps."""
    reports = [simulate(schedule, costs) for schedule in found]
    return min(
        getattr(report, clock)
        for report in reports
        if all(rank.peak_memory <= cap for rank, cap in zip(report.ranks, caps, strict=True))
    )


def random_costs(
    random: Random, num_stages: int, *, delay: int = 4, works: bool = False
) -> CostTable:
    def some(first: int, last: int, count: int = num_stages) -> list[float]:
        return [random.randint(first, last) for _ in range(count)]

    after_forward = some(2, 8)
    names = ("during_forward", "during_input", "during_weight", "during_backward")
    return CostTable(
        forward=some(1, 9),
        backward_input=some(1, 9),
        backward_weight=some(1, 9),
        backward=some(4, 18),
        after_forward=after_forward,
        after_input=[random.randint(1, int(most) + 1) for most in after_forward],
        delay=some(0, delay, num_stages - 1),
        **{name: some(0, 9) for name in names if works},
    )


def random_caps(random: Random, costs: CostTable, placement: Placement, m: int) -> list[float]:
    leasts = map(int, Problem.of(costs, placement, m).smallest_caps)
    return [random.randint(least_held, m * least_held) for least_held in leasts]


@pytest.mark.parametrize("seed", range(12))
def test_two_ranks_are_as_fast_as_the_best_of_all_orders(
    seed: int, two_by_two: list[Schedule]
) -> None:
    random = Random(seed)
    placement = Placement.linear(2)
    costs = random_costs(random, 2, works=seed > 5)
    caps = random_caps(random, costs, placement, 2) if seed % 3 else [math.inf] * 2
    clock = "span" if seed % 2 else "makespan"
    expected = least(two_by_two, costs, caps, clock)
    result = solve(costs, placement, 2, memory=caps, clock=clock)
    assert expected == getattr(result.report, clock) == pytest.approx(result.lower_bound)
    assert result.is_optimal
    result.schedule.verify(costs=costs, memory=caps)


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]], ids=str)
def test_few_actions_are_as_fast_as_the_best_of_all_orders(ranks: list[int]) -> None:
    placement, m = Placement(ranks), 2 if len(ranks) == 1 else 1
    found = all_schedules(placement, m)
    for seed in range(6):
        random = Random(seed)
        costs = random_costs(random, len(ranks), delay=12, works=seed > 2)
        caps = random_caps(random, costs, placement, 2)
        result = solve(costs, placement, m, memory=caps)
        assert least(found, costs, caps) == result.report.makespan == result.lower_bound, seed


def test_actions_that_take_no_time_are_put_in_order(two_by_two: list[Schedule]) -> None:
    for seed in range(3):
        random = Random(seed)
        times = [[random.choice([0, 0, 1, 2]) for _ in range(2)] for _ in range(3)]
        costs = CostTable(
            forward=times[0],
            backward_input=times[1],
            backward_weight=times[2],
            after_forward=[2, 2],
            after_input=[1, 3],
        )
        result = solve(costs, Placement.linear(2), 2, memory=3)
        assert least(two_by_two, costs, [3, 3]) == result.report.makespan == result.lower_bound
        assert result.is_optimal


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 3)])
def test_least_makespan_of_few_microbatches(p: int, m: int) -> None:
    f, i, w = 2.0, 3.0, 1.0  # m <= p, w < i, c = 0
    costs = CostTable.uniform(p, forward=f, backward_input=i, backward_weight=w)
    result = solve(costs, Placement.linear(p), m)
    assert (m + p - 1) * (f + i) + w == result.report.makespan == result.lower_bound


def test_one_rank_is_never_idle() -> None:
    costs = CostTable(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6], delay=9)
    result = solve(costs, Placement([0, 0]), 3, memory=2)
    assert 3 * 21 == result.report.makespan == result.lower_bound


def test_span_of_four_ranks_has_no_bubble_with_the_memory_of_zb_h2() -> None:
    result = solve(CostTable.uniform(4), Placement.linear(4), 7, clock="span", memory=7)
    assert 21 == result.report.span == result.lower_bound


@pytest.mark.parametrize("clock", ["makespan", "span"])
def test_no_schedule_beats_the_lower_bound(clock: Any) -> None:
    for name in ("v-half", "dual-pipe-v"):
        schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
        # In a V a channel carries messages of two edges; the quick ones wait for the slow ones.
        costs = random_costs(Random(len(name)), 4, delay=9)
        report = simulate(schedule, costs)
        caps = [rank.peak_memory for rank in report.ranks]
        result = solve(costs, schedule.placement, 4, memory=caps, clock=clock, hint=schedule)
        assert result.is_optimal
        assert result.lower_bound <= getattr(report, clock)
        result.schedule.verify(costs=costs, memory=caps)


def test_less_memory_takes_more_time() -> None:
    costs = CostTable.uniform(3, after_input=0.5)
    results = [solve(costs, Placement.linear(3), 4, memory=cap) for cap in (1, 2, 4)]
    times = [result.report.makespan for result in results]
    # With one in flight, rank 0 waits for each microbatch to come back; with enough memory, the
    # last rank waits for its first only.
    assert 4 * (3 * 2 + 1) == times[0] > times[1] > times[2] == 2 + 4 * 3
    assert [1, 2, 4] == [math.ceil(result.report.peak_memory) for result in results]
    assert all(result.is_optimal for result in results)


def test_each_rank_keeps_to_its_own_cap() -> None:
    result = solve(CostTable.uniform(2), Placement.linear(2), 4, memory=(math.inf, 1))
    assert 1 == result.report.ranks[1].peak_memory < result.report.ranks[0].peak_memory


def test_full_backward_is_used_where_it_is_cheaper_than_its_halves() -> None:
    halves = Schedule.from_csv("0F0,0I0,0W0,0F1,0I1,0W1,0F2,0I2,0W2\n")
    result = solve(CostTable.uniform(1, backward=1.5), Placement.linear(1), 3, hint=halves)
    assert {Forward, Backward} == {type(action) for action in result.schedule.orders[0]}
    assert 3 * 2.5 == result.report.makespan == result.lower_bound


def test_full_backward_is_used_where_its_halves_do_not_fit() -> None:
    costs = CostTable.uniform(2, backward=5, after_forward=1, after_input=3)
    result = solve(costs, Placement.linear(2), 1, memory=2)
    assert {Forward, Backward} == {type(a) for order in result.schedule.orders for a in order}


def test_full_backward_that_is_dearer_is_not_used() -> None:
    costs = CostTable.uniform(2, backward=2.5)
    result = solve(costs, Placement.linear(2), 2)
    kinds = {type(action) for order in result.schedule.orders for action in order}
    assert {Forward, BackwardInput, BackwardWeight} == kinds


@pytest.mark.parametrize("clock", ["makespan", "span"])
def test_times_without_a_common_unit_are_solved_and_bounded(
    clock: Any, two_by_two: list[Schedule]
) -> None:
    costs = CostTable(
        forward=[math.pi, math.e],
        backward_input=[math.sqrt(2), math.sqrt(11)],
        backward_weight=[math.sqrt(3), math.sqrt(5)],
        after_forward=[math.sqrt(7), 1],
        after_input=[1, math.sqrt(0.5)],
        delay=math.sqrt(0.1),
    )
    caps = [2 * math.sqrt(7), 2]
    result = solve(costs, Placement.linear(2), 2, clock=clock, memory=caps)
    time = getattr(result.report, clock)
    assert least(two_by_two, costs, caps, clock) == pytest.approx(time, rel=1e-6)
    assert time * (1 - 1e-6) <= result.lower_bound <= time
    assert result.is_optimal


def test_units_are_the_largest_common_ones() -> None:
    assert (0.5, (1, 3, 2)) == to_units([0.5, 1.5, 1.0], 10)
    assert (pytest.approx(1 / 6), (2, 3)) == to_units([1 / 3, 1 / 2], 10)
    assert (1.0, (0, 0)) == to_units([0.0, 0.0], 10)
    assert (0.1, (10, 3, 3)) == to_units([1.0, 1 / 3 + 0.01, 0.38], 10)  # Rounded down.


def test_ticks_of_actions_that_take_no_time_raise_no_bound() -> None:
    costs = CostTable.uniform(2, backward_weight=0.0)
    ticks = to_ticks(Problem.of(costs, Placement.linear(2), 2))
    assert 4 == ticks.num_instant
    assert 5 == ticks.to_lower_bound(5 * ticks.ticks_per_unit + 4)
    assert 6 == ticks.to_lower_bound(5 * ticks.ticks_per_unit + 5)


def test_messages_that_take_longer_than_all_else_are_allowed_for() -> None:
    result = solve(CostTable.uniform(2, delay=10), Placement.linear(2), 1)
    assert 1 + 10 + 1 + 1 + 10 + 1 + 1 == result.report.makespan == result.lower_bound


def test_message_behind_a_slow_one_of_another_edge_waits_for_it() -> None:
    """Stages 0 and 2 send to one rank: orders in which the quick overtakes would take 57."""
    costs = CostTable(
        forward=[2, 1, 3, 1], backward_input=[4] * 4, backward_weight=[1] * 4, delay=[0, 0, 9]
    )
    result = solve(costs, Placement.loop(2, stages_per_rank=2), 2)
    assert 50 == result.report.makespan == result.lower_bound


def test_faster_schedule_that_does_not_fit_is_not_taken() -> None:
    """Memory is rounded for the solver, so it may offer one."""
    placement = Placement.linear(2)
    problem = Problem.of(CostTable.uniform(2), placement, 3, memory=2)
    first = one_at_a_time(placement, 3)
    incumbent = Incumbent(simulate(first, problem.costs), problem, None)
    incumbent.offer(GPIPE)  # It holds 3.
    assert first == incumbent.schedule
    fits = schedules.get("1F1B")(num_ranks=2, num_microbatches=3)
    incumbent.offer(fits)
    assert fits == incumbent.schedule


def test_hint_is_the_first_schedule_and_may_have_communication_and_overlaps() -> None:
    order = [Forward(0, 0), Overlap(Forward(0, 1), Backward(0, 0)), Backward(0, 1)]
    hint = Schedule([order], Placement([0]), 2)
    result = solve(CostTable.uniform(1), Placement([0]), 2, hint=hint)
    assert 6 == result.report.makespan
    best = schedules.get("zb-h1")(num_ranks=3, num_microbatches=5)
    seen: list[ExactProgress] = []
    solve(CostTable.uniform(3), best.placement, 5, hint=add_comms(best), progress=seen.append)
    assert simulate(best, CostTable.uniform(3)).makespan == seen[0].best


# To make the problem takes longer than the second: no time is left to solve it.
@pytest.mark.parametrize("seconds", [0.01, 1e-9])
def test_search_that_runs_out_of_time_gives_what_it_has(seconds: float) -> None:
    hint = schedules.get("zb-v")(num_ranks=4, num_microbatches=16)
    # Neither times nor memory have a common unit, and some actions take no time.
    roots = [math.sqrt(stage + 2) for stage in range(8)]
    costs = CostTable(
        forward=roots,
        backward_input=roots[::-1],
        backward_weight=[0, *roots[:7]],
        after_forward=roots,
        after_input=1.0,
    )
    report = simulate(hint, costs)
    caps = [rank.peak_memory for rank in report.ranks]
    result = solve(costs, Placement.v(4), 16, seconds=seconds, hint=hint, memory=caps)
    assert not result.is_optimal
    assert 0 <= result.lower_bound < result.report.makespan <= report.makespan
    assert result.seconds < HANG_S  # Without a limit it takes hours.


def test_progress_tells_of_better_schedules_and_bounds() -> None:
    costs = random_costs(Random(1), 3)
    seen: list[ExactProgress] = []
    result = solve(costs, Placement.linear(3), 4, progress=seen.append)
    assert (result.report.makespan, result.lower_bound) == seen[-1][:2]
    for before, after in pairwise(seen):
        assert before.best > after.best or before.lower_bound < after.lower_bound
        assert before.seconds <= after.seconds


def test_progress_has_only_bounds_that_hold_for_every_order() -> None:
    """Bounds for microbatches in order were shown as if they held for all, and fell later."""
    costs = CostTable.uniform(2, after_forward=10, after_input=4, after_dropping=1)
    seen: list[ExactProgress] = []
    result = solve(costs, Placement.linear(2), 3, memory=12, recompute=True, progress=seen.append)
    assert result.is_optimal
    bounds = [progress.lower_bound for progress in seen]
    assert sorted(bounds) == bounds
    assert result.lower_bound == bounds[-1]


def test_progress_is_printed_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_progress(ExactProgress(best=20.0, lower_bound=15.0, seconds=1.25))
    assert "   1.2 s  best 20  lower bound 15  gap 33.33%\n" == capsys.readouterr().err
    print_progress(ExactProgress(best=20.0, lower_bound=0.0, seconds=0.0))
    assert "gap inf%" in capsys.readouterr().err


def test_exception_of_progress_ends_the_search_and_is_raised() -> None:
    def fail(progress: ExactProgress) -> None:
        raise KeyError(progress)

    with pytest.raises(KeyError, match="lower_bound"):
        solve(CostTable.uniform(2), Placement.linear(2), 4, progress=fail)


def test_same_problem_gives_the_same_schedule() -> None:
    costs = random_costs(Random(3), 4)
    first, second = (solve(costs, Placement.v(2), 3) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.lower_bound == second.lower_bound


def test_solver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("exact.constraint_search", "exact.constraint_model"):
        monkeypatch.delitem(sys.modules, f"penstock.solver.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match=re.escape("pip install 'penstock[exact]'")) as caught:
        solve(CostTable.uniform(1), Placement.linear(1), 1)
    assert isinstance(caught.value.__cause__, ImportError)


TWO = CostTable.uniform(2)
FORWARD_ONLY = Schedule([[Forward(0, 0)], [Forward(1, 0)]], Placement.linear(2), 1)
GPIPE = schedules.get("gpipe")(num_ranks=2, num_microbatches=3)

# The first is refused as every question to the solver is: see test_problem.py.
BAD = [
    ({"placement": [0, 1]}, ScheduleError, "placement is [0, 1]. Expected a Placement"),
    (
        {"costs": CostTable.uniform(2, message_bytes=1, bandwidth=4)},
        CostError,
        "message_bytes / bandwidth of edge 0 is 0.25. The exact solver cannot model messages that",
    ),
    ({"seconds": 0}, ScheduleError, "seconds is 0. Expected a positive number."),
    ({"seconds": "1"}, ScheduleError, "seconds is '1'. Expected a positive number."),
    (
        {"memory": [1, 0.5]},
        ScheduleError,
        "Nothing fits: rank 1 may hold 0.5, but one microbatch on its stages [1] needs 1. "
        "The smallest memory that fits is 1 on each rank",
    ),
    ({"hint": "0F0"}, ScheduleError, "hint is '0F0'. Expected a Schedule."),
    ({"hint": GPIPE}, ScheduleError, "hint has 3 microbatches and Placement(ranks=(0, 1))."),
    (
        {"hint": FORWARD_ONLY, "num_microbatches": 1},
        ScheduleError,
        "hint has no backwards. Expected a schedule for training.",
    ),
    (
        {"hint": GPIPE, "num_microbatches": 3, "memory": 2},
        ScheduleError,
        "hint holds 3 on rank 0, but memory is 2 there. Expected a schedule that fits",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_argument_is_rejected(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"costs": TWO, "placement": Placement.linear(2), "num_microbatches": 2, **changes}
    with pytest.raises(error, match=re.escape(message)):
        solve(**arguments)


def test_time_on_a_channel_does_not_matter_within_a_rank() -> None:
    costs = CostTable.uniform(2, message_bytes=1, bandwidth=4, delay=7)
    assert 6 == solve(costs, Placement([0, 0]), 1).report.makespan
