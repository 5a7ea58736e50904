"""A rank's program: what is known of a step before it runs, with and without skips."""

from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_custom_parts import random_schedule

from fuzzing import IS_LONG, examples
from penstock import Schedule, schedules
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    LazyOrders,
    Message,
    Placement,
    Send,
    Skip,
)
from penstock.ir.action import compute_parts, is_compute
from penstock.ir.dataflow import Dataflow, sent_by
from penstock.ir.message import Channel
from penstock.passes import add_comms, add_sends
from penstock.passes.backward_halves import join_backward
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.program import Entry, Program, make_program
from penstock.schedules import Shape
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes
from skip_models import possible_skips, random_skips

RANKS, MICROBATCHES, STAGES = ((1, 2, 4), (1, 3, 8), (1, 2, 3)) if IS_LONG else ((3,), (4,), (1, 2))
GRID = [
    pytest.param(make(generator, shape), id=f"{generator.name}-p{shape.p}-m{shape.m}-v{shape.v}")
    for generator in REGISTRY
    for shape in shapes(generator, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=STAGES)
]
every_schedule = pytest.mark.parametrize("schedule", GRID)


def _possible(schedule: Schedule) -> list[Skip]:
    return [Skip(*pair) for pair in possible_skips(schedule.num_stages)]


def _programs(schedule: Schedule, skips: Collection[Skip]) -> list[Program]:
    return [make_program(schedule, rank, skips) for rank in range(schedule.num_ranks)]


def _needed(entry: Entry) -> list[Message]:
    return [message for task in entry.tasks for message in task.needs]


def _made_here(program: Program, entry: Entry) -> list[Message]:
    """What an entry hands over within the rank."""
    made = [message for task in entry.tasks for message in task.makes]
    return [message for message in made if not program.flow.is_sent(message)]


def _sent(program: Program) -> Iterator[Message]:
    for entry in program.entries:
        if isinstance(entry.action, Send):
            yield entry.action.message


def _check_computes(schedule: Schedule, skips: Collection[Skip]) -> None:
    """Entries are the computes of the order, each with its tasks; backwards know their halves."""
    parts = [part for order in schedule.orders for a in order for part in compute_parts(a)]
    split = {(part.stage, part.mb) for part in parts if isinstance(part, BackwardInput)}
    for rank, program in enumerate(_programs(schedule, skips)):
        assert rank == program.rank
        computes = [entry.action for entry in program.entries if is_compute(entry.action)]
        assert [action for action in schedule.orders[rank] if is_compute(action)] == computes
        tasks = [task for entry in program.entries for task in entry.tasks]
        for entry in program.entries:
            assert compute_parts(entry.action) == tuple(task.action for task in entry.tasks)
        for task in tasks:
            assert ((task.action.stage, task.action.mb) in split) == task.is_split
        adding = [task for task in tasks if isinstance(task.action, Backward | BackwardWeight)]
        last = {task.action.stage: task for task in adding}
        completing = [task for task in tasks if task.completes_grads]
        assert sorted(map(str, last.values())) == sorted(map(str, completing))


def _check_channels(schedule: Schedule, skips: Collection[Skip]) -> None:
    """A receiver expects a channel's messages in the order in which the sender sends them."""
    programs = _programs(schedule, skips)
    used = set()
    for receiver, program in enumerate(programs):
        for sender, other in enumerate(programs):
            channel = Channel(sender, receiver)
            sent = [key for key in _sent(other) if other.flow.channel(key) == channel]
            assert sent == list(program.arriving.get(sender, ()))
            used |= {channel} if sent else set()
        assert program.rank not in program.arriving
        assert all(program.arriving.values())
    for rank, program in enumerate(programs):
        assert {channel for channel in used if rank in channel} == program.channels


def _check_once(schedule: Schedule, skips: Collection[Skip]) -> None:
    """What is needed from another rank is sent once; nothing else is. Of the same rank: made."""
    sent: Counter[Message] = Counter()
    made: Counter[Message] = Counter()
    needed: Counter[Message] = Counter()
    for program in _programs(schedule, skips):
        sent.update(_sent(program))
        for entry in program.entries:
            made.update(_made_here(program, entry))
            needed.update(_needed(entry))
    assert needed == sent + made
    assert {1} >= set(needed.values())
    mbs = range(schedule.num_microbatches)
    there = {Message(source, target, mb) for source, target in skips for mb in mbs}
    back = {message.answer for message in there if schedule.has_backward}
    assert there | back == {message for message in needed if message.skip}


def _check_acknowledgements(schedule: Schedule, skips: Collection[Skip]) -> int:
    """Runs the programs; returns how many messages were known to have been received."""
    programs = _programs(schedule, skips)
    left = [list(program.entries)[::-1] for program in programs]
    at_hand: set[Message] = set()
    waited_for: list[set[Message]] = [set() for _ in programs]
    total = 0
    while any(left):
        runnable = [
            r for r, rest in enumerate(left) if rest and at_hand.issuperset(_needed(rest[-1]))
        ]
        assert runnable, "the ranks wait for each other"
        for rank in runnable:
            program, entry = programs[rank], left[rank].pop()
            waited_for[rank].update(filter(program.flow.is_sent, _needed(entry)))
            at_hand.update(_made_here(program, entry))
            if isinstance(entry.action, Send):
                message = entry.action.message
                at_hand.add(message)
                receiver = program.flow.channel(message).receiver
                sender, number = programs[receiver].received_before[message]
                assert rank == sender
                from_receiver = program.arriving.get(receiver, ())
                # Those before it on the channel have arrived if a later one was waited for.
                arrived = [n for n, k in enumerate(from_receiver, 1) if k in waited_for[rank]]
                assert max(arrived, default=0) == number
                total += number
    for program in programs:
        arriving = {message for messages in program.arriving.values() for message in messages}
        assert arriving == set(program.received_before)
    return total


def _whole_program(schedule: Schedule, rank: int, skips: Collection[Skip]) -> list[object]:
    """What a program has of each kind, taken from the orders of all ranks with their sends."""
    lowered = add_sends(schedule, skips)
    flow = Dataflow(lowered, skips)
    arriving: dict[int, list[Message]] = {}
    received: dict[Message, tuple[int, int]] = {}
    for sender, order in enumerate(lowered.orders):
        ours = [m for m in sent_by(lowered.orders[rank]) if flow.receiver(m) == sender]
        arrived = 0
        for action in order:
            arrived = max([arrived, *(ours.index(m) + 1 for m in flow.needed(action) if m in ours)])
            if isinstance(action, Send) and flow.receiver(action.message) == rank:
                arriving.setdefault(sender, []).append(action.message)
                received[action.message] = sender, arrived
    channels = {flow.channel(message) for order in lowered.orders for message in sent_by(order)}
    return [
        list(lowered.orders[rank]),
        {sender: tuple(messages) for sender, messages in arriving.items()},
        received,
        {channel for channel in channels if rank in channel},
    ]


def _check_as_a_whole(schedule: Schedule, skips: Collection[Skip]) -> None:
    """A program made of the orders of a rank and its partners is that made of all orders."""
    for rank, program in enumerate(_programs(schedule, skips)):
        actions = [entry.action for entry in program.entries]
        found = [actions, program.arriving, program.received_before, program.channels]
        assert _whole_program(schedule, rank, skips) == found


CHECKS = (
    _check_computes,
    _check_channels,
    _check_once,
    _check_acknowledgements,
    _check_as_a_whole,
)


@every_schedule
def test_programs_are_sound(schedule: Schedule) -> None:
    random = [
        Skip(skip.source, skip.target)
        for skip in (random_skips(schedule.num_stages, 1) if schedule.num_stages > 2 else ())
    ]
    for skips in ([], random):
        for check in CHECKS:
            check(schedule, skips)
            check(keep_forwards(schedule), skips)
        if schedule.has_backward and schedule.num_ranks > 1:
            assert _check_acknowledgements(schedule, skips) > 0


@pytest.mark.parametrize("has_comms", [False, True], ids=["plain", "with sends"])
@pytest.mark.parametrize("seed", range(40 if IS_LONG else 5))
def test_random_schedules_with_all_skips_that_are_possible(seed: int, has_comms: bool) -> None:
    schedule = random_schedule(seed)
    schedule = add_comms(schedule) if has_comms else schedule
    for check in CHECKS:
        check(schedule, _possible(schedule))


@pytest.mark.fuzz
@examples(20, long=1500)
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
    pairs = _possible(schedule)
    skips = data.draw(st.sets(st.sampled_from(pairs), max_size=10)) if pairs else set()
    for check in CHECKS:
        check(schedule, skips)
        check(keep_forwards(schedule), skips)


@pytest.mark.fuzz
@examples(20, long=1500)
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
    for check in CHECKS:
        check(schedule, ())


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
def test_stages_that_run_full_backwards_send_and_wait_for_the_same(schedule: Schedule) -> None:
    skips, whole = _possible(schedule), frozenset(range(0, schedule.num_stages, 2))
    for rank in range(schedule.num_ranks):
        plain = make_program(schedule, rank, skips)
        program = make_program(join_backward(schedule, whole), rank, skips)
        assert plain.arriving == program.arriving
        assert plain.received_before == program.received_before
        assert list(_sent(plain)) == list(_sent(program))
        tasks = [task for entry in program.entries for task in entry.tasks]
        assert not any(task.is_split for task in tasks if task.action.stage in whole)


def test_a_schedule_with_communication_is_taken_as_it_is() -> None:
    """Sends stay where the schedule has them, and so does the order of the channel."""
    schedule = Schedule.from_csv(
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F1,1F1,1RECV_F0,1F0,1B1,1SEND_B1,1B0,1SEND_B0\n"
    )
    schedule.verify()
    first, second = _programs(schedule, ())
    assert [
        Forward(0, 0),
        Forward(0, 1),
        Send(Message(0, 1, 1)),
        Send(Message(0, 1, 0)),
        Backward(0, 1),
        Backward(0, 0),
    ] == [entry.action for entry in first.entries]
    assert {0: (Message(0, 1, 1), Message(0, 1, 0))} == second.arriving
    # Rank 1 has waited for both activations before it sends a gradient.
    assert (1, 2) == first.received_before[Message(1, 0, 1)]


def test_what_skips_stages_is_sent_after_what_goes_to_the_next_one() -> None:
    # Ranks 0 1 1 0: stages 0 and 3 are on rank 0, so what goes between them is not sent.
    schedule = Schedule(
        [
            [Forward(0, 0), Forward(3, 0), Backward(3, 0), Backward(0, 0)],
            [
                Forward(1, 0),
                Forward(2, 0),
                BackwardInput(2, 0),
                Backward(1, 0),
                BackwardWeight(2, 0),
            ],
        ],
        Placement([0, 1, 1, 0]),
        1,
    )
    _, second = _programs(schedule, [Skip(1, 3), Skip(0, 3), Skip(0, 2)])
    expected = (Message(0, 1, 0), Message(0, 2, 0), Message(3, 1, 0), Message(3, 2, 0))
    assert {0: expected} == second.arriving
    # Rank 0 has received both activations of rank 1 before it sends a gradient.
    assert [(0, 0), (0, 0), (0, 2), (0, 2)] == [second.received_before[key] for key in expected]


@pytest.mark.parametrize("skips", [[], [Skip(3, 12)]], ids=["plain", "with a skip"])
@pytest.mark.parametrize("name", schedules.names())
def test_program_needs_only_the_orders_of_the_ranks_that_exchange_messages(
    name: str, skips: list[Skip]
) -> None:
    whole = schedules.get(name)(num_ranks=8, num_microbatches=16)
    orders = whole.orders
    assert isinstance(orders, LazyOrders)
    for rank in range(8):
        asked: set[int] = set()
        schedule = whole.with_orders(
            LazyOrders(
                8,
                lambda other: (asked.add(other), orders[other])[1],  # noqa: B023 (used in the loop)
                lambda other, order: orders.stamps_of(other),
            )
        )
        used = [skip for skip in skips if skip.target < whole.num_stages]
        program = make_program(schedule, rank, used)
        partners = {end for channel in program.channels for end in channel}
        assert partners | {rank} == asked


@pytest.mark.parametrize("name", schedules.names())
def test_program_of_a_rank_in_the_middle_does_not_grow_with_the_number_of_ranks(name: str) -> None:
    sizes = set()
    for p in (8, 32):
        program = make_program(schedules.get(name)(num_ranks=p, num_microbatches=64), p // 2)
        arriving = sorted(map(len, program.arriving.values()))
        actions = [task.action for entry in program.entries for task in entry.tasks]
        num_sent = len(list(_sent(program)))
        num_forwards = sum(isinstance(action, Forward) for action in actions)
        num_weights = sum(isinstance(action, Backward | BackwardWeight) for action in actions)
        sizes.add((*arriving, num_sent, num_forwards, num_weights, len(program.channels)))
    assert 1 == len(sizes)


@pytest.mark.parametrize(
    ("sharded", "order", "expected"),
    [
        pytest.param({0}, "0F0,0F1,0B0,0B1", "0F0,0F1,0B0,0B1,0REDUCE_GRAD", id="full backwards"),
        pytest.param(
            {0},
            "0F0,0F1,0I0,0I1,0W0,0W1",
            "0F0,0F1,0I0,0I1,0RESHARD,0W0,0W1,0REDUCE_GRAD",
            id="freed after the last input backward",
        ),
        pytest.param(
            {1},
            "0F0,1F0,1I0,0I0,1W0,0W0",
            "0F0,1F0,1I0,1RESHARD,0I0,1W0,1REDUCE_GRAD,0W0",
            id="the other stage is not sharded",
        ),
        pytest.param(
            {0},
            "0F0,0I0,0W0,0REDUCE_GRAD",
            "0F0,0I0,0RESHARD,0W0,0REDUCE_GRAD",
            id="the order says when to reduce",
        ),
        pytest.param(
            {0},
            "0UNSHARD,0F0,0I0,0W0,0RESHARD,0REDUCE_GRAD",
            "0UNSHARD,0F0,0I0,0W0,0RESHARD,0REDUCE_GRAD",
            id="the order says it all",
        ),
        pytest.param({0}, "0F0,0F1", "0F0,0F1", id="inference"),
    ],
)
def test_sharded_stage_is_freed_and_reduced_as_early_as_can_be(
    sharded: set[int], order: str, expected: str
) -> None:
    program = make_program(Schedule.from_csv(order + "\n"), 0, sharded=sharded)
    assert expected.split(",") == [str(entry.action) for entry in program.entries]
