"""Cuts of a model: as good as the best of all cuts, and what is rejected."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from penstock import Placement
from penstock.errors import CostError, PartitionError
from penstock.partition import MemoryLimit, Partition, balance

Starts = tuple[int, ...]


# Brute force: every cut, in exact numbers.


def all_starts(num_layers: int, num_stages: int) -> Iterator[Starts]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *cuts)


def exact_sum(values: Iterable[float]) -> Fraction:
    return sum(map(Fraction, values), start=Fraction(0))


def by_stage(values: Iterable[float], starts: Starts) -> list[Fraction]:
    values = list(values)
    return [exact_sum(values[i:j]) for i, j in pairwise((*starts, len(values)))]


def by_rank(stages: list[Fraction], placement: Placement) -> list[Fraction]:
    return [
        exact_sum(stages[stage] for stage in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    ]


def rank_memory(memory: MemoryLimit, starts: Starts, placement: Placement) -> list[Fraction]:
    in_flight = memory.in_flight
    if not isinstance(in_flight, tuple):
        in_flight = (in_flight,) * len(starts)
    fixed, each = by_stage(memory.fixed, starts), by_stage(memory.per_microbatch, starts)
    stages = [
        base + Fraction(count) * share
        for base, count, share in zip(fixed, in_flight, each, strict=True)
    ]
    return by_rank(stages, placement)


def fits(memory: MemoryLimit | None, starts: Starts, placement: Placement) -> bool:
    return memory is None or max(rank_memory(memory, starts, placement)) <= Fraction(memory.cap)


class Problem(NamedTuple):
    costs: list[float]
    placement: Placement
    memory: MemoryLimit | None

    def balance(self, *, slack: float = 0.0) -> Partition:
        return balance(
            self.costs,
            self.placement.num_stages,
            placement=self.placement,
            memory=self.memory,
            slack=slack,
        )

    def all_starts(self) -> list[Starts]:
        """Those that fit the memory."""
        return [
            starts
            for starts in all_starts(len(self.costs), self.placement.num_stages)
            if fits(self.memory, starts, self.placement)
        ]

    def stages(self, starts: Starts) -> list[Fraction]:
        return by_stage(self.costs, starts)

    def slowest(self, starts: Starts) -> Fraction:
        return max(by_rank(self.stages(starts), self.placement))

    def slowest_stage(self, starts: Starts) -> Fraction:
        return max(self.stages(starts))

    def squares(self, starts: Starts) -> Fraction:
        return exact_sum(cost * cost for cost in self.stages(starts))


def values() -> st.SearchStrategy[list[float]]:
    """What to draw numbers from: few whole ones for ties, tenths that add up inexactly, or any."""
    few = st.integers(0, 9).map(float)
    tenths = st.integers(0, 12).map(lambda value: value / 10)
    return st.sampled_from([few, tenths, st.floats(0, 100)]).flatmap(
        lambda numbers: st.lists(numbers, min_size=10, max_size=10)
    )


def relabelled(placement: Placement, order: list[int]) -> Placement:
    return Placement(order[rank] for rank in placement.ranks)


@st.composite
def limits(draw: st.DrawFn, num_layers: int, placement: Placement) -> MemoryLimit:
    """Caps that some cut just fits or just misses, and others."""
    num_stages = placement.num_stages
    counts = st.sampled_from([0, 1, 2, 3, 0.5])
    memory = MemoryLimit(
        cap=draw(st.sampled_from([0, 0.3, 3, 14, 60])),
        fixed=draw(values())[:num_layers],
        per_microbatch=draw(st.one_of(counts, values().map(lambda all: all[:num_layers]))),
        in_flight=draw(
            st.one_of(counts, st.lists(counts, min_size=num_stages, max_size=num_stages))
        ),
    )
    if draw(st.integers(0, 3)) == 0:
        return memory
    starts = draw(st.sampled_from(list(all_starts(num_layers, num_stages))))
    # To the nearest float: at times that is less than the cut needs.
    return replace(memory, cap=float(max(rank_memory(memory, starts, placement))))


@st.composite
def problems(draw: st.DrawFn, kinds: str = "linear v loop", *, capped: bool = False) -> Problem:
    num_ranks = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(kinds.split()))
    placement = {
        "linear": Placement.linear(num_ranks),
        "v": Placement.v(num_ranks),
        "loop": Placement.loop(num_ranks, stages_per_rank=2),
    }[kind]
    placement = relabelled(placement, draw(st.permutations(range(num_ranks))))
    num_stages = placement.num_stages
    num_layers = draw(st.integers(num_stages, 10))
    costs = draw(values())[:num_layers]
    memory = draw(limits(num_layers, placement)) if capped else None
    return Problem(costs, placement, memory)


def smallest_cap_in(message: str) -> float:
    found = re.search(r"Expected at least (\S+)\. ", message)
    assert found is not None
    return float(found[1])


# The result is the best.


@pytest.mark.fuzz
@examples(60, long=20_000)
@given(problem=problems())
def test_no_cut_has_a_faster_slowest_rank(problem: Problem) -> None:
    starts = problem.balance().starts
    assert starts in problem.all_starts()
    assert min(map(problem.slowest, problem.all_starts())) == problem.slowest(starts)


@pytest.mark.fuzz
@examples(60, long=20_000)
@given(problem=problems(capped=True))
def test_cap_is_kept_at_the_least_cost_or_the_error_names_the_smallest_that_fits(
    problem: Problem,
) -> None:
    fitting = problem.all_starts()
    if fitting:
        starts = problem.balance().starts
        assert starts in fitting
        assert min(map(problem.slowest, fitting)) == problem.slowest(starts)
        return
    memory = problem.memory
    assert memory is not None
    with pytest.raises(PartitionError) as caught:
        problem.balance()
    cap = smallest_cap_in(str(caught.value))
    smallest = min(
        max(rank_memory(memory, starts, problem.placement))
        for starts in all_starts(len(problem.costs), problem.placement.num_stages)
    )
    assert math.nextafter(cap, 0) < smallest <= Fraction(cap)


@pytest.mark.fuzz
@examples(60, long=10_000)
@given(problem=st.one_of(problems("linear"), problems("linear", capped=True)))
def test_no_cut_for_one_stage_per_rank_is_as_fast_and_more_even(problem: Problem) -> None:
    fitting = problem.all_starts()
    if not fitting:
        return
    slowest = min(map(problem.slowest, fitting))
    as_fast = [starts for starts in fitting if problem.slowest(starts) == slowest]
    assert min(map(problem.squares, as_fast)) == problem.squares(problem.balance().starts)


def two_per_rank() -> st.SearchStrategy[Problem]:
    return st.one_of(problems("v loop"), problems("v loop", capped=True))


@pytest.mark.fuzz
@examples(60, long=20_000)
@given(problem=two_per_rank())
def test_no_cut_for_two_stages_per_rank_is_as_fast_with_a_faster_slowest_stage(
    problem: Problem,
) -> None:
    fitting = problem.all_starts()
    if not fitting:
        return

    def both(starts: Starts) -> tuple[Fraction, Fraction]:
        return problem.slowest(starts), problem.slowest_stage(starts)

    assert min(map(both, fitting)) == both(problem.balance().starts)


@pytest.mark.fuzz
@examples(60, long=20_000)
@given(
    problem=two_per_rank(),
    slack=st.one_of(st.sampled_from([0.02, 0.1, 0.25, 0.5, 1, 1e300]), st.floats(0, 2)),
)
def test_no_cut_within_the_slack_has_a_faster_slowest_stage_nor_one_like_it_a_faster_rank(
    problem: Problem, slack: float
) -> None:
    fitting = problem.all_starts()
    if not fitting:
        return

    def both(starts: Starts) -> tuple[Fraction, Fraction]:
        return problem.slowest_stage(starts), problem.slowest(starts)

    most = min(map(problem.slowest, fitting)) * (1 + Fraction(slack))
    within = [starts for starts in fitting if problem.slowest(starts) <= most]
    starts = problem.balance(slack=slack).starts
    assert starts in within
    assert min(map(both, within)) == both(starts)


@pytest.mark.fuzz
@examples(60, long=20_000)
@given(problem=two_per_rank(), slack=st.sampled_from([0, 0.05, 0.5]))
def test_no_layer_moved_from_one_stage_to_another_makes_a_cut_more_even(
    problem: Problem, slack: float
) -> None:
    fitting = problem.all_starts()
    if not fitting:
        return
    starts = problem.balance(slack=slack).starts
    for moved in fitting:
        shifts = [new - old for old, new in zip(starts, moved, strict=True)]
        moves = "".join(map(str, map(abs, shifts))).strip("0")
        if {*moves} == {"1"} and len({*shifts} - {0}) == 1:
            assert (
                problem.squares(moved) >= problem.squares(starts)
                or problem.slowest(moved) > problem.slowest(starts)
                or problem.slowest_stage(moved) > problem.slowest_stage(starts)
            )


def test_only_one_rank_of_a_loop_is_as_slow_as_the_slowest_and_the_rest_is_even() -> None:
    """With a heavy last layer, the slowest rank leaves the others room to be uneven in."""
    costs = [1.0] * 16 + [6.0]
    cut = balance(costs, 8, placement=Placement.loop(4, stages_per_rank=2))
    assert (3, 3, 2, 1, 3, 2, 2, 6) == cut.stage_costs


OTHER_PLACEMENTS = [
    Placement.loop(2, stages_per_rank=3),
    Placement.v(2, stages_per_rank=3),
    Placement.loop(1, stages_per_rank=3),
    Placement([0, 0, 1, 1]),
    Placement([0, 1, 0]),
    Placement([0, 1, 2, 1, 0, 2]),
]


@pytest.mark.fuzz
@pytest.mark.parametrize("placement", OTHER_PLACEMENTS, ids=lambda placement: placement.ranks)
@examples(30, long=2_000)
@given(costs=values())
def test_no_cut_for_other_placements_has_a_faster_slowest_stage(
    placement: Placement, costs: list[float]
) -> None:
    problem = Problem(costs, placement, None)
    slowest = min(max(problem.stages(starts)) for starts in problem.all_starts())
    starts = problem.balance().starts
    assert slowest == max(problem.stages(starts))
    # As if each stage were on a rank of its own, so as even as that.
    assert balance(costs, placement.num_stages).starts == starts


def test_fronts_that_come_furthest_are_not_best_since_no_stage_may_be_empty() -> None:
    # Rank 0 can take 2 and the last two layers, but then rank 1 must take 3 and 2, which is 5.
    partition = balance([2, 3, 1, 1, 2, 1, 1], 6, placement=Placement.v(3))
    assert (3.0, 4.0, 4.0) == partition.rank_costs


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(10, (3, 3, 2, 2)), (4, (1, 1, 1, 1))],
)
def test_equal_layers_give_even_stages_and_the_longer_ones_come_first(
    num_layers: int, expected: tuple[int, ...]
) -> None:
    partition = balance([0.1] * num_layers, 4)
    assert expected == tuple(len(partition.layers_of(stage)) for stage in range(4))


TWO_PER_RANK = pytest.mark.parametrize(
    "placement",
    [Placement.v(2), Placement.loop(2, stages_per_rank=2)],
    ids=["v", "loop"],
)


@TWO_PER_RANK
@pytest.mark.parametrize("slack", [0, 0.5])
def test_equal_layers_give_even_stages_with_two_per_rank(
    placement: Placement, slack: float
) -> None:
    partition = balance([0.1] * 12, 4, placement=placement, slack=slack)
    assert (0, 3, 6, 9) == partition.starts


# Ranks 0 and 1, on a V: 9 and 1 with 5 and 5 are equal; 5 and 6 with 4 and 5 are slower by a tenth.
UNEVEN = [5.0, 4.0, 5.0, 5.0, 1.0]


def test_slack_is_taken_where_it_makes_the_slowest_stage_faster() -> None:
    def cut(slack: float) -> tuple[float, ...]:
        return balance(UNEVEN, 4, placement=Placement.v(2), slack=slack).stage_costs

    assert (9.0, 5.0, 5.0, 1.0) == cut(0)
    assert (9.0, 5.0, 5.0, 1.0) == cut(0.0999)
    assert (5.0, 4.0, 5.0, 6.0) == cut(0.1)  # As a float, which is a little more than a tenth.
    assert (9.0, 5.0, 5.0, 1.0) == cut(math.nextafter(0.1, 0))


def test_slack_that_does_not_make_the_slowest_stage_faster_is_not_taken() -> None:
    # One layer is the slowest stage whatever is done, and there are cuts that are slower by half.
    costs = [9, 1, 1, 1, 1, 1, 1]
    for placement in (Placement.v(2), Placement.loop(2, stages_per_rank=2)):
        assert 10.0 == balance(costs, 4, placement=placement, slack=0.5).slowest


@pytest.mark.parametrize("placement", [None, Placement([0, 0, 1, 1])])
def test_slack_means_nothing_for_other_placements(placement: Placement | None) -> None:
    expected = balance(UNEVEN, 4, placement=placement)
    assert expected == balance(UNEVEN, 4, placement=placement, slack=1)


def test_sums_are_exact_where_those_of_floats_are_not() -> None:
    # As floats, 0.1 + 0.2 + 0.3 is more than 0.3 + 0.2 + 0.1; in truth it is the same.
    costs = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    partition = balance(costs, 2)
    assert (0, 3) == partition.starts
    assert partition.stage_costs[0] == partition.stage_costs[1]


@pytest.mark.parametrize(
    "placement",
    [Placement.linear(8), Placement.v(4), Placement.loop(4, stages_per_rank=2)],
    ids=["linear", "v", "loop"],
)
def test_unit_of_the_costs_does_not_matter(placement: Placement) -> None:
    costs = [1 + index * index % 7 for index in range(30)]
    starts = {
        balance([cost * unit for cost in costs], 8, placement=placement).starts
        for unit in (1, 1, 2.0**-60, 2.0**60)
    }
    assert 1 == len(starts)


def test_model_of_usual_size_is_cut_without_a_long_search() -> None:
    # The equal layers of a transformer, between an embedding and a head.
    costs = [0.4, *[1.3] * 78, 3.1]
    for placement in (Placement.v(8), Placement.loop(8, stages_per_rank=2)):
        assert 13.0 == pytest.approx(balance(costs, 16, placement=placement).slowest, rel=0.1)


# What it is made of.


def test_partition_says_what_its_stages_and_ranks_hold_and_cost() -> None:
    partition = balance([1, 2, 3, 4, 5], 4, placement=Placement.v(2))
    assert Partition((0, 2, 3, 4), (1.0, 2.0, 3.0, 4.0, 5.0), Placement.v(2)) == partition
    assert 4 == partition.num_stages
    assert [range(0, 2), range(2, 3), range(3, 4), range(4, 5)] == [
        partition.layers_of(stage) for stage in range(4)
    ]
    assert (3.0, 3.0, 4.0, 5.0) == partition.stage_costs
    assert (8.0, 7.0) == partition.rank_costs
    assert 8.0 == partition.slowest


def test_placement_is_one_stage_per_rank_if_it_is_not_given() -> None:
    assert Placement.linear(3) == balance([1] * 5, 3).placement


def test_numbers_of_any_kind_are_taken_as_floats() -> None:
    expected = balance([0.5, 1.0, 2.0], 2)
    assert expected == balance((Fraction(1, 2), True, 2), 2)
    assert expected == balance(iter([np.float32(0.5), np.float64(1), np.int64(2)]), 2)


def test_costs_may_all_be_nothing() -> None:
    for placement in (Placement.linear(2), Placement.v(1), Placement.loop(1, stages_per_rank=2)):
        assert 0.0 == balance([0, 0, 0], 2, placement=placement).slowest


def test_memory_that_fits_exactly_fits() -> None:
    memory = MemoryLimit(cap=8, fixed=[1, 2, 3], per_microbatch=[1, 0, 1], in_flight=[3, 2])
    # Stage 0: 1 + 2 + 3 * 1 = 6; stage 1: 3 + 2 * 1 = 5. Layer 0 alone is 4, and the others 7.
    assert (0, 2) == balance([1, 1, 2], 2, memory=memory).starts
    memory = MemoryLimit(cap=6, fixed=[1, 2, 3], per_microbatch=[1, 0, 1], in_flight=[3, 2])
    assert (0, 2) == balance([2, 1, 1], 2, memory=memory).starts


def test_one_number_per_microbatch_stands_for_all_layers() -> None:
    assert (0.5, 0.5) == MemoryLimit(cap=1, fixed=[1, 2], per_microbatch=0.5).per_microbatch


# What is rejected.


def limit(**changes: Any) -> MemoryLimit:
    return MemoryLimit(**{"cap": 10, "fixed": [1, 1, 1], **changes})


@pytest.mark.parametrize("num_stages", [0, 1.0])
def test_number_of_stages_that_is_not_positive_and_whole_is_rejected(num_stages: Any) -> None:
    with pytest.raises(
        PartitionError, match=r"num_stages is .*Expected a whole number, at least 1"
    ):
        balance([1, 1], num_stages)


def test_no_layers_are_rejected() -> None:
    with pytest.raises(
        PartitionError, match=r"costs is empty. Give the cost of at least one layer"
    ):
        balance([], 1)


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(PartitionError, match=r"2 layers cannot be cut into 3 stages. Each stage"):
        balance([1, 1], 3)


def test_placement_of_another_kind_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"placement is .*Expected a Placement, such as"):
        balance([1, 1], 2, placement=[0, 1])  # type: ignore[arg-type]


def test_placement_with_another_number_of_stages_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"placement has 4 stages, but num_stages is 2. Exp"):
        balance([1, 1, 1, 1], 2, placement=Placement.v(2))


def test_memory_of_another_kind_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"memory is 10. Expected a MemoryLimit, which also"):
        balance([1, 1], 2, memory=10)  # type: ignore[arg-type]


def test_cap_that_nothing_fits_is_rejected_with_one_that_does() -> None:
    problem = Problem([1, 1, 1], Placement.linear(2), limit(cap=1, fixed=[0.1, 0.2, 1.5]))
    with pytest.raises(
        PartitionError,
        match=r"No cut into 2 stages fits memory.cap, which is 1.0. "
        r"Expected at least 1.5. Raise the cap, or use more ranks or",
    ):
        problem.balance()
    assert (0, 2) == problem._replace(memory=limit(cap=1.5, fixed=[0.1, 0.2, 1.5])).balance().starts


def test_cap_is_checked_for_other_placements() -> None:
    placement = Placement([0, 0, 1])
    enough, less = limit(cap=2, in_flight=[1, 1, 1]), limit(cap=1.9, in_flight=[1, 1, 1])
    assert (0, 1, 2) == Problem([1, 1, 1], placement, enough).balance().starts
    with pytest.raises(
        PartitionError,
        match=r"Rank 0 would need 2.0 of memory, but memory.cap is "
        r"1.9. For this placement the stages are made equal, and the cap is only",
    ):
        Problem([1, 1, 1], placement, less).balance()


def test_cap_does_not_change_the_cut_for_other_placements() -> None:
    # With layer 2 on stage 2 it would fit, but the stages are most even with it on stage 1.
    memory = MemoryLimit(cap=2, fixed=[1, 2, 1, 0])
    problem = Problem([2, 3, 1, 3], Placement([0, 1, 0]), memory)
    with pytest.raises(PartitionError, match=r"Rank 1 would need 3.0 of memory"):
        problem.balance()


@pytest.mark.parametrize("name", ["costs", "fixed", "per_microbatch", "in_flight"])
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (-1, "is -1.0. Expected a finite number that is not negative"),
        (math.nan, "is nan. Expected a finite number that is not negative"),
        (10**400, "is inf. Expected a finite number that is not negative"),
        ("1", "is '1'. Expected a number"),
    ],
)
def test_value_that_is_not_a_number_or_out_of_range_is_rejected(
    name: str, value: Any, fault: str
) -> None:
    values = [1, value, 1]
    with pytest.raises(CostError, match=rf"^{name}\[1\] {fault}"):
        balance(values, 2) if name == "costs" else limit(**{name: values})


@pytest.mark.parametrize(
    ("slack", "fault"),
    [
        (-0.01, "is -0.01. Expected a finite number that is not negative"),
        ("0.02", "is '0.02'. Expected a number"),
    ],
)
def test_slack_that_is_not_a_share_is_rejected_for_each_placement(slack: Any, fault: str) -> None:
    for placement in (Placement.linear(2), Placement.v(1)):
        with pytest.raises(CostError, match=rf"^slack {fault}"):
            balance([1, 1], 2, placement=placement, slack=slack)


@pytest.mark.parametrize("name", ["cap", "per_microbatch", "in_flight"])
def test_single_value_out_of_range_is_rejected(name: str) -> None:
    with pytest.raises(CostError, match=rf"{name}(\[0\])? is -1.0. Expected a finite number"):
        limit(**{name: -1})


def test_values_that_add_up_to_infinity_are_rejected() -> None:
    with pytest.raises(
        CostError, match=r"The sum of costs is infinite. Give them in a larger unit"
    ):
        balance([1e308, 1e308], 1)
    with pytest.raises(CostError, match=r"memory of all layers together is infinite. Give it in a"):
        balance([1, 1, 1], 1, memory=limit(per_microbatch=1e307, in_flight=100))


def test_one_number_for_all_layers_is_rejected() -> None:
    with pytest.raises(CostError, match=r"costs is 3. Expected one number per layer"):
        balance(3, 1)  # type: ignore[arg-type]


def test_memory_with_a_wrong_number_of_values_is_rejected() -> None:
    with pytest.raises(CostError, match=r"per_microbatch has 2 values, but fixed has 3. Expected"):
        limit(per_microbatch=[1, 1])
    with pytest.raises(
        CostError, match=r"memory.fixed has 3 values, but costs has 4. Expected one"
    ):
        balance([1] * 4, 2, memory=limit())
    with pytest.raises(CostError, match=r"memory.in_flight has 3 values, but num_stages is 2. Exp"):
        balance([1] * 3, 2, memory=limit(in_flight=[1, 1, 1]))


@pytest.mark.parametrize(
    "placement", [Placement.linear(3), Placement.v(3), Placement.loop(3, stages_per_rank=2)]
)
@pytest.mark.parametrize("speeds", [(1, 0.5, 1), (0.25, 1, 3), (1, 1, 0.1)])
def test_no_cut_is_faster_on_ranks_of_different_speeds(
    placement: Placement, speeds: tuple[float, ...]
) -> None:
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    num_stages = placement.num_stages
    found = balance(costs, num_stages, placement=placement, speeds=speeds)
    others = [
        Partition((0, *starts), tuple(map(float, costs)), placement, speeds).slowest
        for starts in combinations(range(1, len(costs)), num_stages - 1)
    ]
    assert min(others) == pytest.approx(found.slowest)
    assert found.rank_costs == pytest.approx(
        [
            sum(costs[i] for s in placement.stages_of(rank) for i in found.layers_of(s)) / speed
            for rank, speed in enumerate(speeds)
        ]
    )


@pytest.mark.parametrize("speeds", [(1, 1), (), (1, 0, 1)])
def test_speeds_that_do_not_fit_the_ranks_are_rejected(speeds: tuple[float, ...]) -> None:
    expected = r"speeds is .*\. Expected a positive number for each of the 3 ranks"
    with pytest.raises(PartitionError, match=expected):
        balance([1] * 6, 3, speeds=speeds)
