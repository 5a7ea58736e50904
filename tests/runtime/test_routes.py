"""Programs with values that skip stages: their messages, for every schedule and random skips."""

from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_custom_parts import random_schedule

from fuzzing import examples
from penstock import Schedule
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Placement
from penstock.ir.action import SEND_TYPES, compute_parts
from penstock.ir.inputs import Channel, Described, Inputs
from penstock.passes import add_comms
from penstock.runtime.messages.routes import Key, Routes, Skip
from penstock.runtime.program import Program, Task, forward_only, make_program
from penstock.schedules import Shape
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes
from skip_models import possible_skips, random_skips

GRID = [
    pytest.param(make(generator, shape), id=f"{generator.name}-p{shape.p}-m{shape.m}-v{shape.v}")
    for generator in REGISTRY
    for shape in shapes(generator, ranks=(1, 2, 4), microbatches=(1, 3, 8), stages_per_rank=(1, 3))
    if shape.p * shape.v > 2
]
every_schedule = pytest.mark.parametrize("schedule", GRID)

Skips = Collection[Skip]


def _skips(schedule: Schedule, seed: int) -> Skips:
    return [(skip.source, skip.target) for skip in random_skips(schedule.num_stages, seed)]


def _programs(schedule: Schedule, skips: Skips) -> list[Program]:
    """Each rank's, which knows only of its own skips."""
    ranks = schedule.placement.ranks
    return [
        make_program(schedule, rank, skips={s for s in skips if rank in (ranks[s[0]], ranks[s[1]])})
        for rank in range(schedule.num_ranks)
    ]


def _tasks(program: Program) -> Iterator[Task]:
    for entry in program.entries:
        yield from entry.tasks


def _needed(task: Task) -> list[Key]:
    """What a task waits for, in the order in which a step does."""
    return [*task.needs_from_afar, *([] if task.needs is None else [task.needs])]


def _made_here(program: Program, task: Task) -> list[Key]:
    """What a task hands on within the rank."""
    is_send = isinstance(task.action, SEND_TYPES)
    made = [*task.makes_for_afar, *([] if task.makes is None or is_send else [task.makes])]
    return [key for key in made if not program.routes.is_message(key)]


def _sent(program: Program, task: Task) -> list[Key]:
    """What a task sends, in the order in which a step does."""
    if isinstance(task.action, SEND_TYPES):
        assert task.makes is not None
        return [task.makes]
    return [key for key in task.makes_for_afar if program.routes.is_message(key)]


def _check_order(schedule: Schedule, skips: Skips) -> None:
    """A receiver expects a channel's messages in the order in which the sender sends them."""
    programs = _programs(schedule, skips)
    for receiver, program in enumerate(programs):
        for sender, other in enumerate(programs):
            channel = Channel(sender, receiver)
            sent = [
                key
                for task in _tasks(other)
                for key in _sent(other, task)
                if other.routes.channel(key) == channel
            ]
            assert sent == list(program.arriving.get(sender, ()))
            assert all(program.routes.channel(key) == channel for key in sent)
        assert program.rank not in program.arriving
        assert all(program.arriving.values())


def _check_once(schedule: Schedule, skips: Skips) -> None:
    """What is needed from another rank is sent once; nothing else is. Of the same rank: made."""
    sent: Counter[Key] = Counter()
    made: Counter[Key] = Counter()
    needed: Counter[Key] = Counter()
    for program in _programs(schedule, skips):
        for task in _tasks(program):
            sent.update(_sent(program, task))
            made.update(_made_here(program, task))
            needed.update(_needed(task))
    assert needed == sent + made
    assert {1} >= set(needed.values())
    assert _expected_skips(schedule, skips) == {k for k in needed if isinstance(k, Described)}


def _expected_skips(schedule: Schedule, skips: Skips) -> set[Described]:
    parts = [part for order in schedule.orders for a in order for part in compute_parts(a)]
    has_backward = any(isinstance(part, Backward | BackwardInput) for part in parts)
    mbs = range(schedule.num_microbatches)
    there = {Described(False, source, target, mb) for source, target in skips for mb in mbs}
    back = {Described(True, target, source, mb) for source, target in skips for mb in mbs}
    return there | back if has_backward else there


def _check_acknowledgements(schedule: Schedule, skips: Skips) -> int:
    """Runs the programs; returns how many messages were known to have been received."""
    programs = _programs(schedule, skips)
    left = [list(_tasks(program))[::-1] for program in programs]
    at_hand: set[Key] = set()
    waited_for: list[set[Key]] = [set() for _ in programs]
    total = 0
    while any(left):
        runnable = [
            r for r, tasks in enumerate(left) if tasks and at_hand.issuperset(_needed(tasks[-1]))
        ]
        assert runnable, "the ranks wait for each other"
        for rank in runnable:
            program, task = programs[rank], left[rank].pop()
            waited_for[rank].update(filter(program.routes.is_message, _needed(task)))
            at_hand.update(_made_here(program, task))
            for key in _sent(program, task):
                at_hand.add(key)
                receiver = program.routes.channel(key).receiver
                sender, number = programs[receiver].received_before[key]
                assert rank == sender
                from_receiver = program.arriving.get(receiver, ())
                # Those before it on the channel have arrived if a later one was waited for.
                arrived = [n for n, k in enumerate(from_receiver, 1) if k in waited_for[rank]]
                assert max(arrived, default=0) == number
                total += number
    for program in programs:
        keys = {key for keys in program.arriving.values() for key in keys}
        assert keys == set(program.received_before)
    return total


CHECKS = (_check_order, _check_once, _check_acknowledgements)


@every_schedule
def test_messages_arrive_in_the_order_in_which_they_are_sent(schedule: Schedule) -> None:
    for seed in range(3):
        _check_order(schedule, _skips(schedule, seed))
        _check_order(forward_only(schedule), _skips(schedule, seed))


@every_schedule
def test_every_message_that_is_needed_is_sent_once(schedule: Schedule) -> None:
    for seed in range(3):
        _check_once(schedule, _skips(schedule, seed))
        _check_once(forward_only(schedule), _skips(schedule, seed))


@every_schedule
def test_a_sender_has_received_what_the_program_says_when_it_sends(schedule: Schedule) -> None:
    has_backward = any(isinstance(a, Backward | BackwardInput) for a in schedule.orders[0])
    for seed in range(3):
        num_acknowledged = _check_acknowledgements(schedule, _skips(schedule, seed))
        assert num_acknowledged > 0 or schedule.num_ranks == 1 or not has_backward
        _check_acknowledgements(forward_only(schedule), _skips(schedule, seed))


@pytest.mark.parametrize("has_comms", [False, True], ids=["plain", "with sends"])
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_with_all_skips_that_are_possible(seed: int, has_comms: bool) -> None:
    schedule = random_schedule(seed)
    schedule = add_comms(schedule) if has_comms else schedule
    for check in CHECKS:
        check(schedule, possible_skips(schedule.num_stages))


@pytest.mark.fuzz
@examples(40, long=1500)
@given(
    generator=st.sampled_from(REGISTRY),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    v=st.integers(1, 4),
    data=st.data(),
)
def test_programs_of_random_shapes_and_skips_are_sound(  # type: ignore[no-untyped-def]
    generator, p: int, m: int, v: int, data: st.DataObject
) -> None:
    shape = Shape(p, m, v if generator.takes_any_stages_per_rank else generator.stages_per_rank)
    schedule = make(generator, shape._replace(m=max(m, generator.min_microbatches(shape))))
    pairs = possible_skips(schedule.num_stages)
    skips = data.draw(st.sets(st.sampled_from(pairs), max_size=10)) if pairs else set()
    for check in CHECKS:
        check(schedule, skips)
        check(forward_only(schedule), skips)


@every_schedule
def test_whole_stages_send_and_wait_for_the_same(schedule: Schedule) -> None:
    skips, whole = possible_skips(schedule.num_stages), frozenset(range(0, schedule.num_stages, 2))
    for rank in range(schedule.num_ranks):
        plain = make_program(schedule, rank, skips=skips)
        program = make_program(schedule, rank, skips=skips, whole=whole)
        assert plain.arriving == program.arriving
        assert plain.received_before == program.received_before
        for find in (_needed, lambda task, program=plain: _sent(program, task)):
            assert [key for task in _tasks(plain) for key in find(task)] == [
                key for task in _tasks(program) for key in find(task)
            ]


# Ranks 0 1 1 0: stages 0 and 3 are on rank 0.
V = Schedule(
    [
        [Forward(0, 0), Forward(3, 0), Backward(3, 0), Backward(0, 0)],
        [Forward(1, 0), Forward(2, 0), BackwardInput(2, 0), Backward(1, 0), BackwardWeight(2, 0)],
    ],
    Placement([0, 1, 1, 0]),
    1,
)
V_SKIPS = [(1, 3), (0, 3), (0, 2)]


def test_routes_of_a_value_that_skips() -> None:
    routes = Routes(V, V_SKIPS)
    there, back = Described(False, 0, 2, 0), Described(True, 2, 0, 0)
    assert (Channel(0, 1), Channel(1, 0)) == (routes.channel(there), routes.channel(back))
    assert routes.is_message(there)
    assert not routes.is_message(Described(False, 0, 3, 0))
    assert there == routes.answered(back)
    assert routes.answered(there) is None
    assert there == routes.describe(there)


def test_routes_of_an_action_are_by_stage() -> None:
    routes, inputs = Routes(V, V_SKIPS), Inputs(V)
    assert (Described(False, 0, 2, 0), Described(False, 0, 3, 0)) == routes.made_for_afar(
        Forward(0, 0)
    )
    assert (Described(False, 0, 3, 0), Described(False, 1, 3, 0)) == routes.needed_from_afar(
        Forward(3, 0)
    )
    assert (Described(True, 3, 0, 0), Described(True, 3, 1, 0)) == routes.made_for_afar(
        Backward(3, 0)
    )
    assert (Described(True, 2, 0, 0), Described(True, 3, 0, 0)) == routes.needed_from_afar(
        Backward(0, 0)
    )
    assert (Described(True, 2, 0, 0),) == routes.made_for_afar(BackwardInput(2, 0))
    assert () == routes.made_for_afar(BackwardWeight(2, 0))
    assert () == routes.needed_from_afar(BackwardWeight(2, 0))
    assert () == routes.needed(BackwardWeight(2, 0))
    expected = *inputs.needed(Forward(3, 0)), *routes.needed_from_afar(Forward(3, 0))
    assert expected == routes.needed(Forward(3, 0))
    # What stays on the rank is not sent.
    assert (Described(False, 0, 2, 0),) == routes.sent(Forward(0, 0))
    assert (Described(True, 3, 1, 0),) == routes.sent(Backward(3, 0))


def test_what_skips_is_sent_before_what_goes_to_the_next_stage() -> None:
    _, second = _programs(V, V_SKIPS)
    inputs = Inputs(V)
    (to_next,) = inputs.needed(Forward(1, 0))
    (back_to_second,) = inputs.needed(BackwardInput(2, 0))
    expected = (
        Described(False, 0, 2, 0),
        to_next,
        Described(True, 3, 1, 0),
        back_to_second,
    )
    assert {0: expected} == second.arriving
    # Rank 0 has received both activations of rank 1 before it sends a gradient.
    assert [(0, 0), (0, 0), (0, 2), (0, 2)] == [second.received_before[key] for key in expected]
