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
