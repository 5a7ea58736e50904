"""Actions are small values: their cell is their text, and kinds are never mixed up."""

import pickle
from dataclasses import fields

import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Overlap,
    Recv,
    ReduceGrads,
    Reshard,
    Send,
    Unshard,
)
from penstock.ir.action import (
    SHARDING_TYPES,
    compute_parts,
    gathered_stages,
    in_words,
    is_compute,
    parts,
)
from penstock.ir.csv_text import parse_cell

SINGLE_KINDS = [
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
]
CELLS: list[tuple[Action, str]] = [
    (Forward(0, 1), "0F1"),
    (Backward(12, 0), "12B0"),
    (BackwardInput(2, 3), "2I3"),
    (BackwardWeight(2, 30), "2W30"),
    (Send(Message(1, 2, 4)), "1SEND_F4"),
    (Recv(Message(0, 1, 4)), "1RECV_F4"),
    (Send(Message(1, 0, 4)), "1SEND_B4"),
    (Recv(Message(2, 1, 4)), "1RECV_B4"),
    (Send(Message(0, 3, 4)), "0SEND_F4>3"),
    (Recv(Message(0, 3, 4)), "3RECV_F4<0"),
    (Send(Message(3, 0, 4)), "3SEND_B4>0"),
    (Recv(Message(3, 0, 4)), "0RECV_B4<3"),
    (Unshard(2), "2UNSHARD"),
    (Reshard(2), "2RESHARD"),
    (ReduceGrads(12), "12REDUCE_GRAD"),
    (Overlap(Forward(0, 2), Backward(3, 1)), "(0F2;3B1)OVERLAP_F_B"),
    (Overlap(Forward(0, 2), BackwardInput(3, 1)), "(0F2;3I1)OVERLAP_F_B"),
]


@pytest.mark.parametrize(("action", "cell"), CELLS)
def test_text_of_an_action_is_its_cell_and_is_read_back(action: Action, cell: str) -> None:
    assert cell == str(action)
    assert action == parse_cell(cell)


def test_actions_are_equal_if_kind_stage_and_microbatch_are() -> None:
    assert len(SINGLE_KINDS) == len({kind(0, 1) for kind in SINGLE_KINDS})
    for kind in SINGLE_KINDS:
        assert kind(0, 1) == kind(0, 1)
        assert hash(kind(0, 1)) == hash(kind(0, 1))
        assert kind(0, 1) != kind(1, 0)
        assert kind(0, 1) != kind(0, 2)
        assert kind(0, 1) != (0, 1)


def test_overlaps_are_equal_if_both_halves_are() -> None:
    overlap = Overlap(Forward(0, 1), Backward(0, 0))
    assert Overlap(Forward(0, 1), Backward(0, 0)) == overlap
    assert Overlap(Forward(0, 1), BackwardInput(0, 0)) != overlap
    assert Overlap(Forward(0, 2), Backward(0, 0)) != overlap
    assert overlap != Forward(0, 1)


def test_action_cannot_be_changed() -> None:
    for action, cell in CELLS:
        field = fields(action)[0].name
        with pytest.raises(AttributeError):
            setattr(action, field, 7)
        with pytest.raises(AttributeError):
            delattr(action, field)
        assert cell == str(action)


def test_action_can_go_to_another_process() -> None:
    for action, _ in CELLS:
        assert action == pickle.loads(pickle.dumps(action))


def test_repr_names_the_kind_and_its_fields() -> None:
    assert "BackwardInput(stage=2, mb=3)" == repr(BackwardInput(2, 3))


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Forward(0, 1), (Forward(0, 1),)),
        (Backward(0, 1), (Backward(0, 1),)),
        (BackwardInput(0, 1), (BackwardInput(0, 1),)),
        (BackwardWeight(0, 1), (BackwardWeight(0, 1),)),
        (Overlap(Forward(0, 1), Backward(3, 0)), (Forward(0, 1), Backward(3, 0))),
        (Send(Message(0, 1, 1)), ()),
        (Recv(Message(-1, 0, 1)), ()),
        (Send(Message(0, -1, 1)), ()),
        (Recv(Message(1, 0, 1)), ()),
        (Unshard(0), ()),
        (Reshard(0), ()),
        (ReduceGrads(0), ()),
    ],
    ids=str,
)
def test_computes_have_parts_and_other_actions_have_none(
    action: Action, expected: tuple[Action, ...]
) -> None:
    assert expected == tuple(compute_parts(action))
    assert bool(expected) == is_compute(action)


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_action_of_a_whole_stage_is_its_own_part(kind: type) -> None:
    assert (kind(3),) == parts(kind(3))
    assert kind(3) == kind(3)
    assert kind(3) != kind(4)
    assert len(SHARDING_TYPES) == len({other(3) for other in SHARDING_TYPES})


@pytest.mark.parametrize(
    ("action", "stages"),
    [
        (Forward(1, 0), (1,)),
        (Backward(1, 0), (1,)),
        (BackwardInput(1, 0), (1,)),
        (BackwardWeight(1, 0), ()),
        (Overlap(Forward(0, 1), BackwardInput(3, 0)), (0, 3)),
        (Send(Message(0, 1, 1)), ()),
        (Unshard(1), ()),
    ],
    ids=str,
)
def test_weight_backward_does_not_need_gathered_parameters(
    action: Action, stages: tuple[int, ...]
) -> None:
    assert stages == gathered_stages(action)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Unshard(2), "2UNSHARD (gathering the parameters of stage 2)"),
        (Reshard(2), "2RESHARD (freeing the gathered parameters of stage 2)"),
        (ReduceGrads(2), "2REDUCE_GRAD (reducing the gradients of stage 2)"),
    ],
    ids=str,
)
def test_action_of_a_whole_stage_is_put_in_words(action: Action, words: str) -> None:
    assert words == in_words(action)


@pytest.mark.parametrize(
    "half", [BackwardWeight(0, 0), Forward(0, 2), Send(Message(0, 1, 0))], ids=str
)
def test_overlap_of_other_than_a_forward_and_a_backward_is_rejected(half: Backward) -> None:
    with pytest.raises(ScheduleError, match=f"An overlap of 0F1 and {half} cannot be run. Give it"):
        Overlap(Forward(0, 1), half)


def test_overlap_that_begins_with_a_backward_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="An overlap of 0B1 and 0B0 cannot be run"):
        Overlap(Backward(0, 1), Backward(0, 0))  # type: ignore[arg-type]
