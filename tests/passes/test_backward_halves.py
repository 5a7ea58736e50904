"""Full backwards are cut in two, and halves that are side by side are put together."""

import pytest

from penstock.ir import Backward, Placement, Schedule
from penstock.ir.action import parts
from penstock.passes import add_comms, fuse_backward, split_backward, verify
from penstock.schedules import REGISTRY

SPLIT = {
    "backwards side by side": ("0F0,0F1,0B0,0B1\n", "0F0,0F1,0I0,0W0,0I1,0W1\n"),
    "split in part": ("0F0,0F1,0I0,0B1,0W0\n", "0F0,0F1,0I0,0I1,0W1,0W0\n"),
    "overlap": (
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
        "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n",
    ),
    "overlap of an input backward": (
        "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n",
        "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n",
    ),
    "send, then more": (
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1I0,1SEND_B0,1W0,1I1,1SEND_B1,1W1\n",
    ),
    "inference": ("0F0\n1F0\n", "0F0\n1F0\n"),
}

FUSED = {
    "side by side": ("0F0,0F1,0I0,0W0,0I1,0W1\n", "0F0,0F1,0B0,0B1\n"),
    "apart": ("0F0,0F1,0I0,0I1,0W0,0W1\n", "0F0,0F1,0I0,0I1,0W0,0W1\n"),
    "only the inner pair": ("0F0,0F1,0I0,0I1,0W1,0W0\n", "0F0,0F1,0I0,0B1,0W0\n"),
    "weight backward of another stage": (
        "0F0,1F0,1I0,0I0,1W0,0W0\n",
        "0F0,1F0,1I0,0I0,1W0,0W0\n",
    ),
    "overlap": ("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n", "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"),
    "overlap and a weight backward of another microbatch": (
        "0F0,0F1,0I1,(0F2;0I0)OVERLAP_F_B,0W1,0W0,0B2\n",
        "0F0,0F1,0I1,(0F2;0I0)OVERLAP_F_B,0W1,0W0,0B2\n",
    ),
    "a send between the halves": (
        "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
    ),
    "inference": ("0F0\n1F0\n", "0F0\n1F0\n"),
}


@pytest.mark.parametrize(("text", "split"), SPLIT.values(), ids=list(SPLIT))
def test_split_makes_two_halves_of_each_full_backward(text: str, split: str) -> None:
    verify(Schedule.from_csv(text))
    assert split == split_backward(Schedule.from_csv(text)).to_csv()
    verify(Schedule.from_csv(split))


@pytest.mark.parametrize(("text", "fused"), FUSED.values(), ids=list(FUSED))
def test_fuse_joins_halves_that_are_side_by_side(text: str, fused: str) -> None:
    verify(Schedule.from_csv(text))
    assert fused == fuse_backward(Schedule.from_csv(text)).to_csv()
    verify(Schedule.from_csv(fused))


def test_weight_backward_comes_after_both_sends_of_an_overlap() -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1\n"
    [_, middle, _] = split_backward(add_comms(Schedule.from_csv(text))).to_csv().splitlines()
    assert "(1F1;1I0)OVERLAP_F_B,1SEND_F1,1SEND_B0,1W0" in middle


def test_fusing_undoes_splitting_if_there_is_no_communication() -> None:
    for generator in REGISTRY:
        schedule = generator(num_ranks=3, num_microbatches=6)
        fused = fuse_backward(schedule)
        assert fused == fuse_backward(split_backward(fused)), generator
        assert split_backward(schedule) == split_backward(fused), generator
        for made in (fused, split_backward(fused)):
            verify(made)
            assert made == fuse_backward(made) or made == split_backward(made), generator


def test_split_leaves_no_full_backward_and_keeps_communication_right() -> None:
    for generator in REGISTRY:
        schedule = split_backward(add_comms(generator(num_ranks=3, num_microbatches=6)))
        verify(schedule)
        kinds = {type(part) for order in schedule.orders for a in order for part in parts(a)}
        assert Backward not in kinds, generator


@pytest.mark.parametrize("rewrite", [split_backward, fuse_backward])
def test_placement_and_microbatches_are_kept(rewrite: object) -> None:
    assert callable(rewrite)
    schedule = Schedule(Schedule.from_csv("1F0\n0F0\n").orders, Placement([1, 0]), 7)
    assert schedule == rewrite(schedule)
