"""A rank's program: what is known of a step before it runs, for every registered schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from penstock import Schedule
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Placement,
    RecvActivation,
    SendActivation,
    SendGradient,
)
from penstock.ir.action import SEND_TYPES, compute_parts, is_compute
from penstock.ir.inputs import Inputs
from penstock.ir.walking import walk
from penstock.passes import add_comms
from penstock.runtime.program import Program, forward_only, make_program
from penstock.schedules import Shape
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes

GRID = [
    pytest.param(make(generator, shape), id=f"{generator.name}-p{shape.p}-m{shape.m}-v{shape.v}")
    for generator in REGISTRY
    for shape in shapes(generator, ranks=(1, 2, 4), microbatches=(1, 3, 8), stages_per_rank=(1, 2))
]
every_schedule = pytest.mark.parametrize("schedule", GRID)


def _programs(schedule: Schedule) -> list[Program]:
    return [make_program(schedule, rank) for rank in range(schedule.num_ranks)]


def _sent(program: Program, receiver: int) -> list[int]:
    """What a rank sends to another, in order."""
    made = [
        task.makes
        for entry in program.entries
        if isinstance(entry.action, SEND_TYPES)
        for task in entry.tasks
    ]
    return [key for key in made if key is not None and program.routes.channel(key)[1] == receiver]


def _check_computes(schedule: Schedule) -> None:
    for rank, program in enumerate(_programs(schedule)):
        assert rank == program.rank
        computes = [entry.action for entry in program.entries if is_compute(entry.action)]
        assert [action for action in schedule.orders[rank] if is_compute(action)] == computes
        for entry in program.entries:
            assert (compute_parts(entry.action) or (entry.action,)) == tuple(
                task.action for task in entry.tasks
            )


def _check_messages(schedule: Schedule) -> None:
    programs = _programs(schedule)
    lowered = add_comms(schedule)
    num_messages = sum(isinstance(a, SEND_TYPES) for order in lowered.orders for a in order)
    assert num_messages == sum(len(k) for p in programs for k in p.arriving.values())
    for receiver, program in enumerate(programs):
        for sender, keys in program.arriving.items():
            assert _sent(programs[sender], receiver) == list(keys)
        assert set(program.received_before) == {k for v in program.arriving.values() for k in v}


def _check_tasks(schedule: Schedule) -> None:
    inputs = Inputs(schedule)
    parts = [part for order in schedule.orders for a in order for part in compute_parts(a)]
    split = {(part.stage, part.mb) for part in parts if isinstance(part, BackwardInput)}
    for program in _programs(schedule):
        tasks = [task for entry in program.entries for task in entry.tasks]
        for task in tasks:
            assert ((task.action.stage, task.action.mb) in split) == task.is_split
            if isinstance(task.action, SEND_TYPES):
                assert inputs.sent(task.action) == (task.makes,)
            else:
                assert inputs.needed(task.action) == (() if task.needs is None else (task.needs,))
                assert inputs.made(task.action) == (() if task.makes is None else (task.makes,))
        adding = [task for task in tasks if isinstance(task.action, Backward | BackwardWeight)]
        last = {task.action.stage: task for task in adding}
        assert list(last.values()) == sorted(
            (task for task in tasks if task.completes_grads),
            key=lambda task: list(last).index(task.action.stage),
        )


def _check_acknowledgements(schedule: Schedule) -> int:
    """Runs the schedule; returns how many messages were known to have been received."""
    programs = _programs(schedule)
    lowered = add_comms(schedule)
    inputs = Inputs(lowered)
    waited_for: list[set[int]] = [set() for _ in programs]
    total = 0
    for rank, action, needed, _ in walk(lowered):
        waited_for[rank].update(key for key in needed if inputs.is_message(key))
        for key in inputs.sent(action):
            receiver = inputs.channel(key).receiver
            sender, number = programs[receiver].received_before[key]
            assert rank == sender
            ours = programs[rank].arriving.get(receiver, ())
            # The one before it on the channel has arrived if a later one was waited for.
            arrived = [n for n, k in enumerate(ours, 1) if k in waited_for[rank]]
            assert max(arrived, default=0) == number
            total += number
    return total


@every_schedule
def test_entries_are_the_computes_of_the_order_each_with_its_tasks(schedule: Schedule) -> None:
    _check_computes(schedule)


@every_schedule
def test_messages_arrive_in_the_order_in_which_they_are_sent(schedule: Schedule) -> None:
    _check_messages(schedule)


@every_schedule
def test_tasks_know_their_inputs_and_which_backward_completes_a_stage(schedule: Schedule) -> None:
    _check_tasks(schedule)


@every_schedule
def test_a_sender_has_received_what_the_program_says_when_it_sends(schedule: Schedule) -> None:
    num_acknowledged = _check_acknowledgements(schedule)
    has_backward = any(isinstance(a, Backward | BackwardInput) for a in schedule.orders[0])
    if schedule.num_ranks > 1 and has_backward:
        assert num_acknowledged > 0


@pytest.mark.fuzz
@examples(40, long=1500)
@given(
    generator=st.sampled_from(REGISTRY),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    v=st.integers(1, 4),
)
def test_programs_of_random_shapes_are_sound(generator, p: int, m: int, v: int) -> None:  # type: ignore[no-untyped-def]
    chosen = v if generator.takes_any_stages_per_rank else generator.stages_per_rank
    shape = Shape(p, m, chosen)
    schedule = make(generator, shape._replace(m=max(m, generator.min_microbatches(shape))))
    for check in (_check_computes, _check_messages, _check_tasks, _check_acknowledgements):
        check(schedule)
        check(forward_only(schedule))


@pytest.mark.fuzz
@examples(30, long=1500)
@given(data=st.data())
def test_programs_of_random_orders_and_placements_are_sound(data: st.DataObject) -> None:
    """Any order in which ranks could run, on any placement, neighbouring stages together or not."""
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    used = sorted(set(ranks))
    placement = Placement([used.index(rank) for rank in ranks])
    m = data.draw(st.integers(1, 3))
    num_stages = placement.num_stages
    done: set[object] = set()
    left: list[Forward | Backward | BackwardInput | BackwardWeight] = []
    for stage in range(num_stages):
        for mb in range(m):
            is_split = data.draw(st.booleans())
            halves = [BackwardInput(stage, mb), BackwardWeight(stage, mb)]
            left += [Forward(stage, mb), *(halves if is_split else [Backward(stage, mb)])]
    orders: list[list[object]] = [[] for _ in range(placement.num_ranks)]
    while left:
        ready = [action for action in left if _can_run(action, done, num_stages)]
        action = data.draw(st.sampled_from(ready))
        left.remove(action)
        done.add(action)
        orders[placement.ranks[action.stage]].append(action)
    schedule = Schedule(orders, placement, m)  # type: ignore[arg-type]
    schedule.verify()
    for check in (_check_computes, _check_messages, _check_tasks, _check_acknowledgements):
        check(schedule)


def _can_run(action: object, done: set[object], num_stages: int) -> bool:
    match action:
        case Forward(stage=stage, mb=mb):
            return stage == 0 or Forward(stage - 1, mb) in done
        case Backward(stage=stage, mb=mb) | BackwardInput(stage=stage, mb=mb):
            after = {Backward(stage + 1, mb), BackwardInput(stage + 1, mb)}
            is_due = stage == num_stages - 1 or not after.isdisjoint(done)
            return Forward(stage, mb) in done and is_due
        case BackwardWeight(stage=stage, mb=mb):
            return BackwardInput(stage, mb) in done
    raise AssertionError(action)


@every_schedule
def test_forward_only_keeps_the_forwards_in_order_and_verifies(schedule: Schedule) -> None:
    forwards = forward_only(schedule)
    forwards.verify()
    assert schedule.placement == forwards.placement
    assert schedule.num_microbatches == forwards.num_microbatches
    for order, kept in zip(schedule.orders, forwards.orders, strict=True):
        parts = [part for action in order for part in compute_parts(action)]
        assert [part for part in parts if isinstance(part, Forward)] == list(kept)
    for program in _programs(forwards):
        assert not any(task.completes_grads for e in program.entries for task in e.tasks)


@every_schedule
def test_whole_stages_run_full_backwards_in_place_of_input_backwards(schedule: Schedule) -> None:
    whole = frozenset(range(0, schedule.num_stages, 2))
    for rank, order in enumerate(schedule.orders):
        program = make_program(schedule, rank, whole=whole)
        plain = make_program(schedule, rank)
        actual = [task for entry in program.entries for task in entry.tasks]
        expected = []
        for action in (task.action for entry in plain.entries for task in entry.tasks):
            if isinstance(action, BackwardInput) and action.stage in whole:
                expected.append(Backward(action.stage, action.mb))
            elif not (isinstance(action, BackwardWeight) and action.stage in whole):
                expected.append(action)
        assert expected == [task.action for task in actual]
        assert plain.arriving == program.arriving
        assert plain.received_before == program.received_before
        assert not any(task.is_split for task in actual if task.action.stage in whole)
        trained = {part.stage for a in order for part in compute_parts(a)} if any(
            isinstance(part, Backward | BackwardWeight) for a in order for part in compute_parts(a)
        ) else set()  # fmt: skip
        assert sorted(trained) == sorted(t.action.stage for t in actual if t.completes_grads)


def test_an_overlap_of_a_whole_stage_holds_a_full_backward() -> None:
    text = "0F0,0F1,(0F2;0I0)OVERLAP_F_B,0W0,0I1,0W1,0B2\n"
    program = make_program(Schedule.from_csv(text), 0, whole={0})
    expected = [
        Forward(0, 0),
        Forward(0, 1),
        Overlap(Forward(0, 2), Backward(0, 0)),
        Backward(0, 1),
        Backward(0, 2),
    ]
    assert expected == [entry.action for entry in program.entries]


def test_a_schedule_with_communication_is_taken_as_it_is() -> None:
    """Sends stay where the schedule has them, and so does the order of the channel."""
    schedule = Schedule.from_csv(
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F1,1F1,1RECV_F0,1F0,1B1,1SEND_B1,1B0,1SEND_B0\n"
    )
    schedule.verify()
    first, second = _programs(schedule)
    inputs = Inputs(schedule)
    assert [
        Forward(0, 0),
        Forward(0, 1),
        SendActivation(0, 1),
        SendActivation(0, 0),
        Backward(0, 1),
        Backward(0, 0),
    ] == [entry.action for entry in first.entries]
    assert {0: (inputs.received(RecvActivation(1, 1)) + inputs.received(RecvActivation(1, 0)))} == (
        second.arriving
    )
    # Rank 1 has waited for both activations before it sends a gradient.
    (gradient,) = inputs.sent(SendGradient(1, 1))
    assert (1, 2) == first.received_before[gradient]
