"""Orders in a V are squeezed as numbers as they are action by action."""

import pytest
from reference_squeeze import lay_out, squeeze

from fuzzing import IS_LONG
from penstock import schedules
from penstock.ir import Action, BackwardInput, BackwardWeight, Forward, LazyOrders
from penstock.ir.action import compute_parts
from penstock.schedules import Shape
from penstock.schedules.building_block import Block, _repeat, repeat_block
from penstock.schedules.squeezing import layout_of

RANKS = range(1, 10) if IS_LONG else (1, 2, 3, 4, 6)
MICROBATCHES = range(1, 20) if IS_LONG else (1, 2, 3, 5, 8, 13)
SHAPES = [Shape(p, m, 2) for p in RANKS for m in MICROBATCHES]


def v_half(p: int, rank: int) -> Block:
    shift = 3 if p % 2 == 0 else 0
    return Block(2 * rank, 3 * p - 2 - rank, 3 * p + shift + 2 * rank - 1, 6 * p + shift - rank - 2)


def v_min(p: int, rank: int) -> Block:
    shift = 2 if p % 3 == 0 else 0
    return Block(rank, 2 * p - 1 - rank, 2 * p + shift + rank, 4 * p + shift - 1 - rank)


BLOCKS = {"V-Half": v_half, "V-Min": v_min}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_laid_out_and_squeezed_as_action_by_action(name: str) -> None:
    for shape in SHAPES:
        ranks = range(shape.p)
        laid_out = [lay_out(shape, rank, BLOCKS[name](shape.p, rank)) for rank in ranks]
        for rank, order in enumerate(laid_out):
            expected = layout_of(shape, order)
            assert expected == _repeat(shape, rank, BLOCKS[name](shape.p, rank))
        schedule = schedules.get(name)(num_ranks=shape.p, num_microbatches=shape.m)
        assert squeeze(shape, laid_out) == list(map(list, schedule.orders))


def test_zb_v_of_few_microbatches_is_squeezed_as_action_by_action() -> None:
    zb_v = schedules.get("ZB-V")
    for shape in SHAPES:
        full = max(shape.m, 2 * shape.p - 1)
        orders: list[list[Action]] = [
            [action for action in order if compute_parts(action)[0].mb < shape.m]
            for order in zb_v(num_ranks=shape.p, num_microbatches=full).orders
        ]
        expected = orders if full == shape.m else squeeze(shape, orders)
        schedule = zb_v(num_ranks=shape.p, num_microbatches=shape.m)
        assert expected == list(map(list, schedule.orders))


def test_passes_are_squeezed_once_however_many_orders_are_asked_for() -> None:
    asked: list[int] = []

    def block(rank: int) -> Block:
        asked.append(rank)
        return v_min(4, rank)

    orders = repeat_block(Shape(4, 8, 2), block)
    assert isinstance(orders, LazyOrders)
    assert [] == asked
    assert 3 * 2 * 8 == len(orders[2])
    num_asked = len(asked)
    assert 4 <= num_asked
    assert orders[2] is orders[2]
    assert num_asked == len(asked)
    assert orders[1] != orders[2]
    assert num_asked + 1 == len(asked)


def test_blocks_that_collide_are_refused() -> None:
    with pytest.raises(AssertionError, match="the passes of two microbatches collide"):
        repeat_block(Shape(1, 2, 2), lambda rank: Block(0, 6, 7, 8))[0]


def test_weights_are_in_the_order_of_their_inputs() -> None:
    order = schedules.get("V-Half")(num_ranks=4, num_microbatches=8).orders[1]
    inputs = [(a.stage, a.mb) for a in order if isinstance(a, BackwardInput)]
    weights = [(a.stage, a.mb) for a in order if isinstance(a, BackwardWeight)]
    assert inputs == weights
    assert isinstance(order[0], Forward)
