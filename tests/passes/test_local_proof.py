"""Each rank proves its own part: together they accept what `verify` accepts, and no more."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_mutants import MUTATIONS, mutate, small_schedules

from fuzzing import IS_LONG, examples
from penstock import Schedule, schedules
from penstock.errors import ScheduleError
from penstock.ir import Action, Backward, Forward, LazyOrders, Placement, Rank
from penstock.ir.action import compute_parts
from penstock.ir.lazy_orders import Order
from penstock.passes.simpler_orders import keep_forwards
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes

RANKS = (1, 2, 3, 4, 5, 8)
# Fewer than there are ranks, as many, and numbers that they do not divide.
MICROBATCHES = range(1, 34) if IS_LONG else (1, 2, 3, 5, 7, 8, 11, 16, 17, 33)


def _faults(schedule: Schedule) -> list[str]:
    """What each rank that refuses its part says."""
    found = []
    for rank in range(schedule.num_ranks):
        try:
            schedule.verify(rank=rank)
        except ScheduleError as error:
            found.append(str(error))
    return found


def _fault(schedule: Schedule) -> str | None:
    """What `verify` says of the whole."""
    try:
        schedule.verify()
    except ScheduleError as error:
        return str(error)
    return None


def _with_stamps_of(mutant: Schedule, original: Schedule) -> Schedule:
    """The mutant in parts, in which each action keeps its stamp; new ones have any."""
    orders = original.orders
    assert isinstance(orders, LazyOrders)
    known = {
        part: stamp
        for rank, order in enumerate(orders)
        for action, stamp in zip(order, orders.stamps_of(rank), strict=True)
        for part in compute_parts(action)
    }

    def stamps(rank: Rank, order: Order) -> list[int]:
        parts = [(compute_parts(action) or (None,))[0] for action in order]
        return [known.get(part, 1) for part in parts]  # type: ignore[arg-type]

    return mutant.with_orders(LazyOrders(mutant.num_ranks, mutant.orders.__getitem__, stamps))


@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
def test_every_rank_of_every_algorithm_is_proved(generator: schedules.Generator) -> None:
    for shape in shapes(generator, ranks=RANKS, microbatches=MICROBATCHES):
        schedule = make(generator, shape)
        schedule.verify()
        assert [] == _faults(schedule), shape
        assert [] == _faults(keep_forwards(schedule)), shape


@pytest.mark.parametrize("generator", REGISTRY, ids=lambda generator: generator.name)
@pytest.mark.parametrize(("p", "m"), [(32, 64), (37, 80)])
def test_ranks_of_larger_shapes_are_proved(generator: schedules.Generator, p: int, m: int) -> None:
    schedule = generator(num_ranks=p, num_microbatches=m)
    assert [] == _faults(schedule)


def _check_mutant(mutant: Schedule, original: Schedule) -> bool:
    """Compare the proofs of all ranks with that of the whole; return whether they accept."""
    whole = _fault(mutant)
    faults = _faults(_with_stamps_of(mutant, original))
    if whole is not None:
        assert faults, f"accepted, but {whole}\n{mutant.to_csv()}"
        computes = all(compute_parts(action) for order in mutant.orders for action in order)
        assert whole in faults or not computes, f"{whole}\n\n{faults}"
    return not faults


def test_mutants_are_refused_by_a_rank_in_the_words_of_the_whole() -> None:
    random = Random(0)
    accepted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for kind in MUTATIONS:
        for _ in range(400 if IS_LONG else 60):
            original = random.choice(small_schedules("as made"))
            is_accepted = _check_mutant(mutate(original, kind, random), original)
            (accepted if is_accepted else refused)[kind] += 1
    assert all(refused[kind] >= 20 for kind in MUTATIONS)
    assert sum(accepted.values()) >= 20  # Mostly W, which may be anywhere after its I.


@pytest.mark.fuzz
@examples(100, long=5000)
@given(
    st.sampled_from(small_schedules("as made")),
    st.lists(st.sampled_from(list(MUTATIONS)), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_what_all_ranks_accept_is_accepted_as_a_whole(
    original: Schedule, kinds: list[str], random: Random
) -> None:
    mutant = original
    for kind in kinds:
        if mutant.num_actions > 0:
            mutant = mutate(mutant, kind, random)
    whole = _fault(mutant)
    if not _faults(_with_stamps_of(mutant, original)):
        assert whole is None, f"{whole}\n{mutant.to_csv()}"


def test_random_stamps_are_refused_or_prove_what_is_true() -> None:
    """A schedule that can run, and one that cannot, whatever their stamps are."""
    good = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    bad = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert "waits forever" in str(_fault(bad))
    random = Random(0)
    num_accepted = 0
    for _ in range(3000):
        drawn = [[random.randint(0, 8) for _ in range(4)] for _ in range(2)]
        drawn = [sorted(row) for row in drawn] if random.random() < 0.9 else drawn

        def stamps(rank: Rank, order: Order, drawn: list[list[int]] = drawn) -> list[int]:
            return drawn[rank]

        parts = good.with_orders(LazyOrders(2, good.orders.__getitem__, stamps))
        num_accepted += not _faults(parts)
        parts = bad.with_orders(LazyOrders(2, bad.orders.__getitem__, stamps))
        assert _fault(bad) in _faults(parts)
    assert 3 <= num_accepted <= 2900


def _two_ranks(stamps: Sequence[Sequence[int]], **orders: Sequence[Action]) -> Schedule:
    made = [
        orders.get("first", [Forward(0, 0), Backward(0, 0)]),
        orders.get("second", [Forward(1, 0), Backward(1, 0)]),
    ]
    lazy = LazyOrders(2, made.__getitem__, lambda rank, order: stamps[rank])
    return Schedule(lazy, Placement.linear(2), 1)


@pytest.mark.parametrize(
    ("stamps", "rank", "text"),
    [
        ([[0, 0], [1, 2]], 0, "position 1: 0B0 has stamp 0, but the action before it has 0"),
        ([[0, 9], [2, 1]], 1, "position 1: 1B0 has stamp 1, but the action before it has 2"),
        (
            [[1, 9], [1, 2]],
            1,
            "position 0: 1F0 has stamp 1, but stage 0 on rank 0, which makes the activation that "
            "it needs, has 1",
        ),
        (
            [[0, 3], [1, 3]],
            0,
            "position 1: 0B0 has stamp 3, but stage 1 on rank 1, which makes the gradient that "
            "it needs, has 3",
        ),
    ],
)
def test_stamps_that_do_not_grow_are_refused(stamps: list[list[int]], rank: int, text: str) -> None:
    schedule = _two_ranks(stamps)
    schedule.verify()
    with pytest.raises(ScheduleError) as raised:
        schedule.verify(rank=rank)
    assert text in str(raised.value)
    assert "mend the stamps" in str(raised.value)
    _two_ranks([[0, 3], [1, 2]]).verify(rank=rank)


def test_ranks_of_which_one_has_no_backwards_refuse_both() -> None:
    """Each order is complete, as one for training and one for inference."""
    schedule = _two_ranks([[0], [1, 2]], first=[Forward(0, 0)])
    expected = _fault(schedule)
    assert expected is not None
    assert "0B0, or 0I0 and 0W0, is missing" in expected
    assert [expected, expected] == _faults(schedule)


def test_only_the_orders_of_a_rank_and_its_partners_are_made() -> None:
    for generator in REGISTRY:
        whole = generator(num_ranks=16, num_microbatches=32)
        orders = whole.orders
        assert isinstance(orders, LazyOrders)
        for rank in (0, 7, 15):
            asked: set[int] = set()
            schedule = whole.with_orders(_watched(orders, asked.add))
            schedule.verify(rank=rank, memory=100)
            ranks, held = schedule.placement.ranks, schedule.placement.stages_of(rank)
            near = {stage + step for stage in held for step in (-1, 0, 1)}
            assert {ranks[s] for s in near.intersection(range(len(ranks)))} == asked


def _watched(orders: LazyOrders, note: Callable[[Rank], object]) -> LazyOrders:
    def make(rank: Rank) -> Order:
        note(rank)
        return orders[rank]

    return LazyOrders(len(orders), make, lambda rank, order: orders.stamps_of(rank))


@pytest.mark.parametrize("rank", [-1, 4, "first"])
def test_rank_that_does_not_exist_is_refused(rank: int) -> None:
    schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=4)
    with pytest.raises(ScheduleError, match=r"rank is .* Expected a rank of the schedule: 0 to 3"):
        schedule.verify(rank=rank)


def test_memory_is_checked_on_that_rank_only() -> None:
    schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=8)
    schedule.verify(rank=3, memory=1)
    schedule.verify(rank=0, memory=[4, 0, 0, 0])
    with pytest.raises(ScheduleError, match="rank 0, position 1: the rank holds 2, but its memory"):
        schedule.verify(rank=0, memory=1)


def test_schedule_without_stamps_is_verified_as_a_whole() -> None:
    bad = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B0\n")
    for orders in (bad.orders, LazyOrders(2, bad.orders.__getitem__)):
        with pytest.raises(ScheduleError, match="rank 1, position 3: 1B0 repeats work"):
            bad.with_orders(orders).verify(rank=0)
