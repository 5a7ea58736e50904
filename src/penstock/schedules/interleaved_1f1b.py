"""Interleaved 1F1B. Any number of stages per rank, in a loop. A v-th of 1F1B's bubble for more
memory and messages. arXiv:2104.04473 section 2.2.

    p=2, m=4, v=2, F=B=1     [1] warm-up  [2] steady: B then F  [3] drain
    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Microbatches go in rounds of p: a round passes a stage before the rank's next stage has its turn.
If p does not divide m, the rounds are larger, and as equal as possible, so that every m works;
a larger round holds more memory.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from penstock.ir import Action, Backward, Forward, LazyOrders
from penstock.ir.lazy_orders import Order
from penstock.schedules.alternation import alternate
from penstock.schedules.generator import Bubble, Generator, Orders, Shape, Times, loop
from penstock.schedules.stamping import in_turn


def rounds(shape: Shape) -> list[range]:
    """Return the microbatches in rounds of p, or of a little more if p does not divide m."""
    count = max(1, shape.m // shape.p)
    bounds = [-(-shape.m * k // count) for k in range(count + 1)]  # Larger rounds first.
    return [range(first, last) for first, last in pairwise(bounds)]


def forwards_ahead(shape: Shape, rank: int, *, per_rank: int) -> int:
    """Count a rank's forwards before its first backward: `per_rank` more than on the next."""
    return (shape.v - 1) * len(rounds(shape)[0]) + per_rank * (shape.p - 1 - rank) + 1


def interleave(shape: Shape, rank: int, *, per_rank: int, lead: int = 0) -> list[Action]:
    """Return the order of `rank`, with full backwards.

    In each round the rank's first stage runs `lead` microbatches further than its other stages.
    """
    p, m, v = shape
    stages = range(rank, p * v, p)
    forwards = []
    backwards = []
    done = 0
    for group in rounds(shape):
        upto = min(m, group.stop + lead)
        forwards += [Forward(rank, mb) for mb in range(done, upto)]
        forwards += [Forward(stage, mb) for stage in stages[1:] for mb in group]
        backwards += [Backward(stage, mb) for stage in reversed(stages) for mb in group]
        done = upto
    ahead = forwards_ahead(shape, rank, per_rank=per_rank) + lead
    return list(alternate(forwards, backwards, ahead=ahead))


def interleaved_stamps(
    shape: Shape, rank: int, order: Order, *, per_rank: int, lead: int = 0
) -> Iterator[int]:
    """Return the stamps of `rank`'s order, which `interleave` made; backwards may be split.

    Each rank starts `per_rank` later than the one before it. A round that is smaller than p leaves
    the places of the microbatches that it lacks empty, so that it can go through all ranks.
    """
    p, m, v = shape
    round_of = [group for group in rounds(shape) for _ in group]
    width = [max(len(group), p) for group in round_of]

    def forward_place(stage: int, mb: int) -> int:
        turn = stage // p
        start = round_of[mb if turn else max(mb - lead, 0)].start
        further = min(lead, m - round_of[mb].stop) if turn else 0
        return v * start + turn * width[mb] + mb - start + further

    def backward_place(stage: int, mb: int) -> int:
        start = round_of[mb].start
        return v * start + (v - 1 - stage // p) * width[mb] + mb - start

    return in_turn(
        order,
        first=per_rank * rank,
        ahead=(v - 1) * width[0] + per_rank * (p - 1 - rank) + 1 + lead,
        forward_place=forward_place,
        backward_place=backward_place,
    )


def interleaved_orders(shape: Shape, *, per_rank: int, lead: int = 0) -> LazyOrders:
    """Return the orders of all ranks, with full backwards; see `interleave`."""
    return LazyOrders(
        shape.p,
        partial(interleave, shape, per_rank=per_rank, lead=lead),
        partial(interleaved_stamps, shape, per_rank=per_rank, lead=lead),
    )


def _bubble(shape: Shape, times: Times) -> float:
    p, _, v = shape
    return (p - 1) * times.total / v + 2 * (v * p - 1) * times.c


def _holds(shape: Shape, times: Times) -> bool:
    p, m, v = shape
    is_hidden = v * times.c <= min(times.f, times.i + times.w)
    return m >= p and (times.c == 0 or (is_hidden and m % p == 0 and p > 1))


def _orders(shape: Shape) -> Orders:
    return interleaved_orders(shape, per_rank=2)


interleaved_1f1b = Generator(
    name="Interleaved1F1B",
    source="Megatron-LM, arXiv:2104.04473 section 2.2; the term of c is fitted",
    placement=loop,
    stages_per_rank=2,
    takes_any_stages_per_rank=True,
    bubble=Bubble(_bubble, "makespan", _holds),
    peak=lambda shape: min(shape.m * shape.v, forwards_ahead(shape, 0, per_rank=2)) / shape.v,
    orders=_orders,
)
