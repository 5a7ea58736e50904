"""`verify` agrees with a slow and obvious checker about schedules that differ in one action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_verify import find_fault
from schedule_mutants import FORMS, MUTATIONS, mutate, small_schedules

from fuzzing import IS_LONG, examples
from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import verify


def is_accepted(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.fuzz
def test_both_accept_every_schedule_that_is_mutated() -> None:
    for form in FORMS:
        for schedule in small_schedules(form)[:: 1 if IS_LONG else 4]:
            verify(schedule)
            assert find_fault(schedule) is None


@pytest.mark.fuzz
@examples(200, long=10_000)
@given(
    st.sampled_from(list(FORMS)).flatmap(lambda form: st.sampled_from(small_schedules(form))),
    st.lists(st.sampled_from(list(MUTATIONS)), min_size=1, max_size=2),
    st.randoms(use_true_random=False),
)
def test_mutant_is_accepted_if_and_only_if_the_reference_finds_no_fault(
    schedule: Schedule, kinds: list[str], random: Random
) -> None:
    for kind in kinds:
        if schedule.num_actions > 0:  # The one action that there was may have been dropped.
            schedule = mutate(schedule, kind, random)
    fault = find_fault(schedule)
    assert (fault is None) == is_accepted(schedule), f"{fault}\n{schedule.to_csv()}"


def test_mutants_of_each_kind_are_rejected_and_many_mutants_are_accepted() -> None:
    random = Random(0)
    outcomes: Counter[tuple[str, bool]] = Counter()
    faults: Counter[str | None] = Counter()
    for form in FORMS:
        for kind in MUTATIONS:
            for _ in range(25):
                mutant = mutate(random.choice(small_schedules(form)), kind, random)
                fault = find_fault(mutant)
                assert (fault is None) == is_accepted(mutant), mutant.to_csv()
                outcomes[kind, fault is None] += 1
                faults[fault] += 1
    assert all(outcomes[kind, False] >= 20 for kind in MUTATIONS)
    often = ["swap neighbours", "swap", "move", "join"]
    assert all(outcomes[kind, True] >= 10 for kind in often)
    assert {
        None,
        "misplaced",
        "miscounted",
        "out of order",
        "communication incomplete",
        "communication out of order",
        "channel out of order",
        "not gathered",
        "misreduced",
        "deadlock",
    } == {fault for fault, count in faults.items() if count >= 5}
