"""Which messages an action needs and makes, and which channel they take."""

import pytest

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Overlap,
    Placement,
    Recv,
    Schedule,
    Send,
    Skip,
)
from penstock.ir.dataflow import Dataflow
from penstock.ir.message import Channel

# Stages 1 and 2 of a V of two ranks are on one rank: what passes between them is not sent.
V = Placement.v(2)
LINEAR = Placement.linear(3)
LOOP = Placement.loop(3, stages_per_rank=2)
MIXED = Placement([2, 0, 1])


def flow_of(placement: Placement, skips: list[Skip] | None = None) -> Dataflow:
    return Dataflow(Schedule([[]] * placement.num_ranks, placement, 6), skips)


@pytest.mark.parametrize("placement", [Placement([0]), Placement([0, 0]), V, LINEAR, LOOP, MIXED])
def test_what_one_stage_makes_its_neighbour_needs(placement: Placement) -> None:
    flow = flow_of(placement)
    for stage in range(placement.num_stages - 1):
        ranks = placement.ranks[stage], placement.ranks[stage + 1]
        [activation] = flow.made(Forward(stage, 3))
        [gradient] = flow.made(Backward(stage + 1, 3))
        assert Message(stage, stage + 1, 3) == activation == gradient.answer
        assert Message(stage + 1, stage, 3) == gradient == activation.answer
        assert (activation,) == flow.needed(Forward(stage + 1, 3))
        assert (gradient,) == flow.needed(Backward(stage, 3))
        assert ranks == tuple(flow.channel(activation)) == tuple(flow.channel(gradient))[::-1]
        assert (ranks[0] != ranks[1]) == flow.is_sent(activation) == flow.is_sent(gradient)
        assert flow.has(activation)


@pytest.mark.parametrize(
    ("action", "needed", "made"),
    [
        (Forward(0, 1), [], [(0, 1, 1)]),
        (Forward(1, 1), [(0, 1, 1)], [(1, 2, 1)]),
        (Forward(2, 1), [(1, 2, 1)], []),
        (Backward(0, 1), [(1, 0, 1)], []),
        (BackwardInput(1, 1), [(2, 1, 1)], [(1, 0, 1)]),
        (BackwardInput(2, 1), [], [(2, 1, 1)]),
        (BackwardWeight(1, 1), [], []),
        (
            Overlap(Forward(1, 1), BackwardInput(1, 0)),
            [(0, 1, 1), (2, 1, 0)],
            [(1, 2, 1), (1, 0, 0)],
        ),
        (Send(Message(0, 1, 0)), [], []),
        (Recv(Message(0, 1, 0)), [], []),
    ],
    ids=str,
)
def test_only_computes_need_and_make_messages(
    action: Action, needed: list[tuple[int, int, int]], made: list[tuple[int, int, int]]
) -> None:
    flow = flow_of(LINEAR)
    assert (needed, made) == (list(flow.needed(action)), list(flow.made(action)))


def test_values_that_skip_stages_come_and_go_in_the_order_of_stages() -> None:
    # Ranks 0 1 1 0: stages 0 and 3 are on rank 0.
    flow = flow_of(V, [Skip(1, 3), Skip(0, 3), Skip(0, 2)])
    assert ((0, 1, 0), (0, 2, 0), (0, 3, 0)) == flow.made(Forward(0, 0))
    assert ((0, 3, 0), (1, 3, 0), (2, 3, 0)) == flow.needed(Forward(3, 0))
    assert ((3, 0, 0), (3, 1, 0), (3, 2, 0)) == flow.made(Backward(3, 0))
    assert ((1, 0, 0), (2, 0, 0), (3, 0, 0)) == flow.needed(Backward(0, 0))
    assert ((2, 0, 0), (2, 1, 0)) == flow.made(BackwardInput(2, 0))
    assert (Channel(0, 1), Channel(1, 0)) == (
        flow.channel(Message(0, 2, 0)),
        flow.channel(Message(2, 0, 0)),
    )
    assert flow.is_sent(Message(0, 2, 0))
    assert not flow.is_sent(Message(0, 3, 0))


def test_a_schedule_has_the_skips_that_it_sends() -> None:
    text = "0F0,0SEND_F0,0SEND_F0>2\n1F0,1SEND_F0\n2F0\n"
    schedule = Schedule.from_csv(text)
    assert {Skip(0, 2)} == schedule.skips
    assert ((0, 2, 0), (1, 2, 0)) == Dataflow(schedule).needed(Forward(2, 0))
    assert frozenset() == Schedule.from_csv("0F0\n1F0\n2F0\n").skips


@pytest.mark.parametrize(
    "message", [Message(2, 3, 0), Message(0, -1, 0), Message(0, 2, 0), Message(0, 1, 6)]
)
def test_message_that_nobody_makes_is_not_there(message: Message) -> None:
    assert not flow_of(LINEAR).has(message)


def test_message_in_words() -> None:
    there, back = Message(0, 3, 1), Message(3, 0, 1)
    assert ("activation", "gradient") == (there.kind, back.kind)
    assert Skip(0, 3) == there.skip == back.skip
    assert Message(2, 1, 0).skip is None
    assert 1 == Message(1, 2, 0).edge == Message(2, 1, 0).edge
