"""Orders that leave something out."""

import pytest

from penstock import Schedule
from penstock.ir.action import Forward, compute_parts
from penstock.passes.backward_halves import join_backward, split_stages
from penstock.passes.simpler_orders import keep_forwards, part_overlaps
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes

every_schedule = pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(make(generator, shape), id=f"{generator.name}-v{shape.v}")
        for generator in REGISTRY
        for shape in shapes(generator, ranks=(3,), microbatches=(6,), stages_per_rank=(1, 2))
    ],
)


@every_schedule
def test_forwards_are_kept_in_order_and_verify(schedule: Schedule) -> None:
    forwards = keep_forwards(schedule)
    forwards.verify()
    assert not forwards.has_backward
    assert schedule.placement == forwards.placement
    assert schedule.num_microbatches == forwards.num_microbatches
    for order, kept in zip(schedule.orders, forwards.orders, strict=True):
        parts = [part for action in order for part in compute_parts(action)]
        assert [part for part in parts if isinstance(part, Forward)] == list(kept)


@every_schedule
def test_joined_backwards_are_whole_and_verify(schedule: Schedule) -> None:
    joined = join_backward(schedule)
    joined.verify()
    assert frozenset() == split_stages(joined)
    assert schedule.has_backward == joined.has_backward
    assert joined == join_backward(joined)


def test_only_the_given_stages_are_joined_in_overlaps_too() -> None:
    schedule = Schedule.from_csv("0F0,0F1,(0F2;0I0)OVERLAP_F_B,0W0,0I1,0W1,0B2\n")
    expected = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n"
    assert expected == join_backward(schedule, {0}).to_csv()
    assert schedule == join_backward(schedule, {1})
    assert {0} == split_stages(schedule)


def test_overlaps_are_parted_forward_first() -> None:
    schedule = Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert "0F0,0F1,0B0,0B1\n" == part_overlaps(schedule).to_csv()


GATHERED = {
    "once": (
        "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD,0REDUCE_GRAD\n",
        "0UNSHARD,0F0,0F1,0RESHARD\n",
    ),
    "per need": (
        "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD\n",
        "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD\n",
    ),
    "left gathered at the end": ("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0\n", "0UNSHARD,0F0,0RESHARD\n"),
    "gathered before an overlap": (
        "0F0,0UNSHARD,(0F1;0B0)OVERLAP_F_B,0B1,0RESHARD\n",
        "0F0,0UNSHARD,0F1,0RESHARD\n",
    ),
}


@pytest.mark.parametrize(("text", "kept"), GATHERED.values(), ids=list(GATHERED))
def test_gathers_for_forwards_are_kept(text: str, kept: str) -> None:
    assert kept == keep_forwards(Schedule.from_csv(text)).to_csv()


def test_gathers_frees_and_reductions_stay_where_backwards_are_joined_or_overlaps_parted() -> None:
    text = "0UNSHARD,0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0RESHARD,0W1,0REDUCE_GRAD\n"
    schedule = Schedule.from_csv(text)
    joined = "0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1,0RESHARD,0REDUCE_GRAD\n"
    parted = "0UNSHARD,0F0,0F1,0I0,0W0,0I1,0RESHARD,0W1,0REDUCE_GRAD\n"
    assert joined == join_backward(schedule).to_csv()
    assert parted == part_overlaps(schedule).to_csv()
