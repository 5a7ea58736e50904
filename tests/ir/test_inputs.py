"""What an action needs, makes, sends and receives, and which channel it takes."""

import pytest

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Placement,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
)
from penstock.ir.action import Recv, Send
from penstock.ir.inputs import Inputs

# Stages 1 and 2 of a V of two ranks are on one rank: what passes between them is no message.
V = Placement.v(2)
LINEAR = Placement.linear(3)
LOOP = Placement.loop(3, stages_per_rank=2)
MIXED = Placement([2, 0, 1])

ALL_PLACEMENTS = [Placement([0]), Placement([0, 0]), V, LINEAR, LOOP, MIXED]


def inputs_of(placement: Placement, num_microbatches: int = 6) -> Inputs:
    return Inputs(Schedule([[]] * placement.num_ranks, placement, num_microbatches))


@pytest.mark.parametrize(
    ("send", "receive", "placement", "sender", "receiver"),
    [
        (SendActivation(0, 5), RecvActivation(1, 5), LINEAR, 0, 1),
        (SendGradient(2, 5), RecvGradient(1, 5), LINEAR, 2, 1),
        (SendActivation(2, 0), RecvActivation(3, 0), V, 1, 0),
        (SendGradient(3, 0), RecvGradient(2, 0), V, 0, 1),
        (SendActivation(2, 0), RecvActivation(3, 0), LOOP, 2, 0),
        (SendGradient(1, 4), RecvGradient(0, 4), MIXED, 0, 2),
    ],
)
def test_message_passes_between_the_ranks_of_neighbouring_stages(
    send: Send, receive: Recv, placement: Placement, sender: int, receiver: int
) -> None:
    inputs = inputs_of(placement)
    [key] = inputs.sent(send)
    assert (key,) == inputs.received(receive)
    assert send == inputs.send(key)
    assert receive == inputs.recv(key)
    assert (sender, receiver) == tuple(inputs.channel(key))
    assert inputs.is_message(key)


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_each_input_has_a_number_of_its_own(placement: Placement) -> None:
    inputs = inputs_of(placement)
    last = placement.num_stages - 1
    made = [
        key
        for stage in range(placement.num_stages)
        for mb in range(6)
        for action in (Forward(stage, mb), Backward(stage, mb))
        for key in inputs.made(action)
    ]
    assert 2 * last * 6 == len(set(made)) == len(made)


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_what_one_stage_makes_the_next_one_needs(placement: Placement) -> None:
    inputs = inputs_of(placement)
    for stage in range(placement.num_stages - 1):
        ranks = placement.ranks[stage], placement.ranks[stage + 1]
        [activation] = inputs.made(Forward(stage, 3))
        [gradient] = inputs.made(Backward(stage + 1, 3))
        assert (activation,) == inputs.needed(Forward(stage + 1, 3))
        assert (gradient,) == inputs.needed(Backward(stage, 3))
        assert (False, stage, stage + 1, 3) == tuple(inputs.describe(activation))
        assert (True, stage + 1, stage, 3) == tuple(inputs.describe(gradient))
        assert ranks == tuple(inputs.channel(activation))
        assert ranks[::-1] == tuple(inputs.channel(gradient))
        assert (ranks[0] != ranks[1]) == inputs.is_message(activation)
        assert (ranks[0] != ranks[1]) == inputs.is_message(gradient)


@pytest.mark.parametrize(
    ("action", "needed", "made"),
    [
        (Forward(0, 1), [], ["0SEND_F1"]),
        (Forward(1, 1), ["1RECV_F1"], ["1SEND_F1"]),
        (Forward(2, 1), ["2RECV_F1"], []),
        (Backward(0, 1), ["0RECV_B1"], []),
        (Backward(1, 1), ["1RECV_B1"], ["1SEND_B1"]),
        (BackwardInput(1, 1), ["1RECV_B1"], ["1SEND_B1"]),
        (BackwardInput(2, 1), [], ["2SEND_B1"]),
        (BackwardWeight(1, 1), [], []),
        (
            Overlap(Forward(1, 1), BackwardInput(1, 0)),
            ["1RECV_F1", "1RECV_B0"],
            ["1SEND_F1", "1SEND_B0"],
        ),
        (SendActivation(0, 0), [], []),
        (RecvActivation(1, 0), [], []),
    ],
    ids=str,
)
def test_only_computes_need_and_make_inputs(
    action: Action, needed: list[str], made: list[str]
) -> None:
    inputs = inputs_of(LINEAR)
    assert needed == [str(inputs.recv(key)) for key in inputs.needed(action)]
    assert made == [str(inputs.send(key)) for key in inputs.made(action)]


@pytest.mark.parametrize(
    "action",
    [SendActivation(2, 0), SendGradient(0, 0), RecvActivation(0, 0), RecvGradient(2, 0)],
    ids=str,
)
def test_nothing_passes_beyond_the_first_and_the_last_stage(action: Action) -> None:
    inputs = inputs_of(LINEAR)
    assert () == inputs.sent(action)
    assert () == inputs.received(action)


def test_sends_receive_nothing_and_receives_send_nothing() -> None:
    inputs = inputs_of(LINEAR)
    assert () == inputs.received(SendActivation(1, 0))
    assert () == inputs.sent(RecvGradient(1, 0))
    assert () == inputs.sent(Forward(1, 0))
    assert () == inputs.received(Forward(1, 0))
