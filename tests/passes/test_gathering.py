"""Where gathers, frees and reductions are placed, for each policy."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_mutants import FORMS, small_schedules

from fuzzing import examples
from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardWeight,
    ReduceGrads,
    Reshard,
    Schedule,
    Unshard,
)
from penstock.ir.action import compute_parts, gathered_stages, is_compute
from penstock.passes import (
    Gathers,
    add_comms,
    add_gathers,
    add_sends,
    remove_gathers,
)

ONE_STAGE = "0F0,0F1,0I0,0W0,0I1,0W1\n"
TWO_STAGES = "0F0,0F1,1F0,1F1,1I0,1I1,0I0,0I1,1W0,1W1,0W0,0W1\n"
LATE_WEIGHTS = "0F0,1F0,0F1,1F1,1I0,1W0,1I1,0I0,0I1,1W1,0W0,0W1\n"
THREE_STAGES = "0F0,1F0,2F0,2B0,1B0,0B0\n"
# U, R and G are a gather, a free and a reduction of the stage before it.
PLACED = {
    "once": (
        Gathers.once(),
        ONE_STAGE,
        "0U 0F0 0F1 0I0 0W0 0I1 0W1 0R 0G",
    ),
    "once, an action ahead": (
        Gathers.once(),
        TWO_STAGES,
        "0U 0F0 1U 0F1 1F0 1F1 1I0 1I1 1R 0I0 0I1 1W0 1W1 1G 0W0 0W1 0R 0G",
    ),
    "once, not ahead": (
        Gathers.once(ahead=0),
        TWO_STAGES,
        "0U 0F0 0F1 1U 1F0 1F1 1I0 1I1 1R 0I0 0I1 1W0 1W1 1G 0W0 0W1 0R 0G",
    ),
    "once, as early as possible": (
        Gathers.once(ahead=9),
        TWO_STAGES,
        "0U 1U 0F0 0F1 1F0 1F1 1I0 1I1 1R 0I0 0I1 1W0 1W1 1G 0W0 0W1 0R 0G",
    ),
    "per need": (
        Gathers.per_need(),
        TWO_STAGES,
        "0U 0F0 1U 0F1 0R 1F0 1F1 1I0 0U 1I1 1R 0I0 0I1 0R 1W0 0U 1W1 1G 0W0 0W1 0R 0G",
    ),
    "per need, with a weight backward in between": (
        Gathers.per_need(ahead=0),
        LATE_WEIGHTS,
        "0U 0F0 0R 1U 1F0 1R 0U 0F1 0R 1U 1F1 1I0 1R 1W0 1U 1I1 1R 0U 0I0 0I1 0R 1W1 0U 1G 0W0 0W1 "
        "0R 0G",
    ),
    "per need, runs that are too close to be apart": (
        Gathers.per_need(ahead=1),
        LATE_WEIGHTS,
        "0U 1U 0F0 1F0 0F1 0R 1F1 1I0 1W0 0U 1I1 1R 0I0 0I1 1W1 1G 0W0 0W1 0R 0G",
    ),
    "at most 1": (
        Gathers.at_most(1),
        THREE_STAGES,
        "0U 0F0 0R 1U 1F0 1R 2U 2F0 2B0 2R 1U 2G 1B0 1R 0U 1G 0B0 0R 0G",
    ),
    "at most 2, of which the one that is needed last is freed": (
        Gathers.at_most(2, ahead=0),
        THREE_STAGES,
        "0U 0F0 1U 1F0 0R 2U 2F0 2B0 2R 2G 1B0 1R 0U 1G 0B0 0R 0G",
    ),
    "at most 2, and early where there is room": (
        Gathers.at_most(2),
        THREE_STAGES,
        "0U 1U 0F0 0R 2U 1F0 2F0 2B0 2R 0U 2G 1B0 1R 1G 0B0 0R 0G",
    ),
    "at most 2, of which the next one is gathered early": (
        Gathers.at_most(2, stages_ahead=2),
        THREE_STAGES,
        "0U 1U 0F0 0R 2U 1F0 2F0 2B0 2R 0U 2G 1B0 1R 1G 0B0 0R 0G",
    ),
    "at most 2, of which none is gathered early": (
        Gathers.at_most(2, stages_ahead=1),
        THREE_STAGES,
        "0U 0F0 1U 1F0 0R 2U 2F0 2B0 2R 2G 1B0 1R 0U 1G 0B0 0R 0G",
    ),
    "two stages early, however many actions before": (
        Gathers.at_most(2, stages_ahead=2),
        TWO_STAGES,
        "0U 1U 0F0 0F1 1F0 1F1 1I0 1I1 1R 0I0 0I1 1W0 1W1 1G 0W0 0W1 0R 0G",
    ),
    "per need, but the next stage early": (
        Gathers(frees_between=True, stages_ahead=2),
        THREE_STAGES,
        "0U 1U 0F0 0R 2U 1F0 2F0 2B0 2R 0U 2G 1B0 1R 1G 0B0 0R 0G",
    ),
    "more than there are": (
        Gathers.at_most(7),
        THREE_STAGES,
        "0U 1U 0F0 2U 1F0 2F0 2B0 2R 2G 1B0 1R 1G 0B0 0R 0G",
    ),
    "overlap": (
        Gathers.at_most(2),
        "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n",
        "0U 1U 0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 1R 1G 0B1 0R 0G",
    ),
    "inference": (Gathers.once(), "0F0,0F1\n", "0U 0F0 0F1 0R"),
}


def cells(schedule: Schedule) -> str:
    """Return the order of the only rank in the short form of `PLACED`."""
    text = schedule.to_csv().strip().replace(",", " ")
    for long, short in (("UNSHARD", "U"), ("RESHARD", "R"), ("REDUCE_GRAD", "G")):
        text = text.replace(long, short)
    return text


@pytest.mark.parametrize(("policy", "text", "expected"), PLACED.values(), ids=list(PLACED))
def test_actions_are_placed_by_the_policy(policy: Gathers, text: str, expected: str) -> None:
    schedule = Schedule.from_csv(text)
    placed = add_gathers(schedule, policy)
    assert expected.split() == cells(placed).split()
    assert schedule == remove_gathers(placed)


def test_free_waits_for_the_sends_and_gather_does_not_wait_for_the_receive() -> None:
    schedule = Schedule.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD,0REDUCE_GRAD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD,1REDUCE_GRAD\n"
    ) == add_gathers(schedule, Gathers.once()).to_csv()


def test_only_given_stages_are_gathered() -> None:
    placed = add_gathers(Schedule.from_csv(THREE_STAGES), Gathers.at_most(1), [1])
    assert "0F0 1U 1F0 2F0 2B0 1B0 1R 1G 0B0" == cells(
        add_gathers(Schedule.from_csv(THREE_STAGES), Gathers.at_most(1, ahead=0), [1])
    )
    assert {Unshard(1), Reshard(1), ReduceGrads(1)} == {
        action for action in placed.orders[0] if not is_compute(action)
    }
    assert not add_gathers(Schedule.from_csv(THREE_STAGES), Gathers.once(), []).has_sharding


def test_each_rank_can_have_a_policy() -> None:
    schedule = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    placed = add_gathers(schedule, [Gathers.at_most(1), Gathers.once(ahead=9)])
    expected = [
        add_gathers(schedule, policy) for policy in (Gathers.at_most(1), Gathers.once(ahead=9))
    ]
    assert [expected[rank].orders[rank] for rank in range(2)] == list(placed.orders)
    with pytest.raises(ScheduleError, match="or one for each of the 2 ranks"):
        add_gathers(schedule, [Gathers.once()])


@pytest.mark.parametrize("stages_ahead", [-1, 3, 1.0, True])
def test_number_of_stages_ahead_is_checked(stages_ahead: int) -> None:
    with pytest.raises(ScheduleError, match=r"stages_ahead is .* at most 2, which may be gathered"):
        Gathers.at_most(2, stages_ahead=stages_ahead)


def test_actions_and_stages_ahead_exclude_each_other() -> None:
    with pytest.raises(ScheduleError, match=r"both ahead \(3\) and stages_ahead \(2\)"):
        Gathers.at_most(2, ahead=3, stages_ahead=2)


POLICIES = [
    *(Gathers.once(ahead=ahead) for ahead in (0, 1, 3)),
    *(Gathers.per_need(ahead=ahead) for ahead in (0, 1, 3)),
    *(Gathers.at_most(most, ahead=ahead) for most in (2, 3) for ahead in (0, 1, 3)),
    *(Gathers.at_most(3, stages_ahead=count) for count in (1, 2, 3)),
]


@pytest.mark.fuzz
@examples(60, long=3_000)
@given(
    schedule=st.sampled_from([form for form in FORMS if "gathered" not in form]).flatmap(
        lambda form: st.sampled_from(small_schedules(form))
    ),
    policy=st.sampled_from(POLICIES),
)
def test_any_schedule_has_what_it_needs_gathered_and_no_more_than_allowed(
    schedule: Schedule, policy: Gathers
) -> None:
    placed = add_gathers(schedule, policy)
    placed.verify()
    assert schedule == remove_gathers(placed)
    for order in placed.orders:
        gathered: set[int] = set()
        for action in order:
            if isinstance(action, Unshard):
                gathered.add(action.stage)
            elif isinstance(action, Reshard):
                gathered.remove(action.stage)
            assert gathered.issuperset(needed_by(action))
            assert len(gathered) <= policy.most
        assert not gathered
        last = {
            part.stage: place
            for place, action in enumerate(order)
            for part in compute_parts(action)
            if isinstance(part, Backward | BackwardWeight)
        }
        reduced = [action.stage for action in order if isinstance(action, ReduceGrads)]
        assert sorted(last) == sorted(reduced)
        assert all(place < order.index(ReduceGrads(stage)) for stage, place in last.items())
        if policy.stages_ahead:
            for place, action in enumerate(order):
                if isinstance(action, Unshard):
                    assert action.stage in next_stages(order[place:], policy.stages_ahead)
    gathers = Counter(action for action in actions(placed) if isinstance(action, Unshard))
    if policy.most == inf and not policy.frees_between:
        assert {1} == set(gathers.values())


@pytest.mark.fuzz
@examples(40, long=1_000)
@given(schedule=st.sampled_from(small_schedules("as made")), policy=st.sampled_from(POLICIES))
def test_it_does_not_matter_whether_messages_are_added_before_or_after(
    schedule: Schedule, policy: Gathers
) -> None:
    for add in (add_sends, add_comms):
        assert add(add_gathers(schedule, policy)) == add_gathers(add(schedule), policy)


def next_stages(order: tuple[Action, ...], count: int) -> set[int]:
    """The next `count` stages that an order needs; an overlap may add one more."""
    found: set[int] = set()
    for action in order:
        if len(found) < count:
            found |= needed_by(action)
    return found


def actions(schedule: Schedule) -> Iterable[Action]:
    return (action for order in schedule.orders for action in order)


def count_gathers(schedule: Schedule) -> int:
    return sum(isinstance(action, Unshard) for action in actions(schedule))


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_choice_of_frees_takes_fewer_gathers(most: int, ahead: int) -> None:
    """Gathering early must not free what is needed sooner, which would cost a gather more."""
    for schedule in small_schedules("split"):
        orders = [gathered_stages_of(order) for order in schedule.orders]
        if max(map(len, (need for needs in orders for need in needs)), default=0) > most:
            continue
        if schedule.num_actions > 40:
            break
        fewest = sum(fewest_gathers(needs, most) for needs in orders)
        placed = add_gathers(schedule, Gathers.at_most(most, ahead=ahead))
        assert fewest == count_gathers(placed)


def gathered_stages_of(order: tuple[Action, ...]) -> list[tuple[int, ...]]:
    needs = [needed_by(action) for action in order]
    return [tuple(sorted(need)) for need in needs if need]


def needed_by(action: Action) -> set[int]:
    """The weight backward of the first stage counts too: it may be all of its backward."""
    return {*gathered_stages(action), *(p.stage for p in compute_parts(action) if p.stage == 0)}


def fewest_gathers(needs: list[tuple[int, ...]], most: int) -> int:
    """Try every choice of what stays gathered."""
    stages = sorted({stage for need in needs for stage in need})
    subsets = [
        frozenset(stage for stage, keep in zip(stages, chosen, strict=True) if keep)
        for chosen in product((False, True), repeat=len(stages))
        if sum(chosen) <= most
    ]
    costs: dict[frozenset[int], float] = {frozenset(): 0}
    for need in needs:
        costs = {
            after: min(cost + len(after - before) for before, cost in costs.items())
            for after in subsets
            if after.issuperset(need)
        }
    return int(min(costs.values()))


def test_schedule_with_gathers_is_refused() -> None:
    placed = add_gathers(Schedule.from_csv(ONE_STAGE), Gathers.once())
    with pytest.raises(ScheduleError, match=r"already has gathers, frees or reductions\. Give"):
        add_gathers(placed, Gathers.once())


def test_schedule_that_cannot_run_is_refused() -> None:
    with pytest.raises(ScheduleError, match="0W0 runs before 0I0"):
        add_gathers(Schedule.from_csv("0F0,0W0,0I0\n"), Gathers.once())


def test_fewer_stages_than_an_overlap_needs_are_refused() -> None:
    schedule = Schedule.from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n")
    with pytest.raises(ScheduleError) as caught:
        add_gathers(schedule, Gathers.at_most(1))
    assert (
        "The policy is at-most:1, but (0F1;1B0)OVERLAP_F_B on rank 0 needs 2 stages at once. "
        "Allow at least that many."
    ) == str(caught.value)


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "2"])
def test_limit_that_is_not_a_number_of_stages_is_refused(most: int) -> None:
    with pytest.raises(ScheduleError, match=f"most is {most!r}. Expected a whole number"):
        Gathers.at_most(most)


@pytest.mark.parametrize("ahead", [-1, 0.5])
def test_look_ahead_that_is_not_a_number_of_actions_is_refused(ahead: int) -> None:
    with pytest.raises(ScheduleError, match=f"ahead is {ahead}. Expected a whole number"):
        Gathers.once(ahead=ahead)


def test_policy_that_is_not_one_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"policy is 'once'\. Expected a penstock"):
        add_gathers(Schedule.from_csv(ONE_STAGE), "once")  # type: ignore[arg-type]


def test_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stages has 3\. Expected stages from 0 to 2\."):
        add_gathers(Schedule.from_csv(THREE_STAGES), Gathers.once(), [0, 3])
