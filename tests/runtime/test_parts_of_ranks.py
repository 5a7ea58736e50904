"""Each rank of a large schedule makes, proves and compares its own part; steps cost the same."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from failing_steps import Layer, errors_of, mse_loss
from split_model import make_stages

from fuzzing import rotated
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, local_ranks, schedules
from penstock.errors import AgreementError, ScheduleError
from penstock.ir import Backward, Forward, LazyOrders, Rank, Skip
from penstock.ir.lazy_orders import Order
from penstock.runtime.rank_facts import RankFacts, RankSkips, digest_orders, have_same_orders

NUM_RANKS, NUM_MICROBATCHES = 6, 4
CPU = torch.device("cpu")


def _one_f_one_b() -> Schedule:
    return schedules.get("1F1B")(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)


def _lazy(
    make: Callable[[Rank], Order], stamps: Callable[[Rank, Order], Any] | None = None
) -> Schedule:
    known = _one_f_one_b()
    assert isinstance(known.orders, LazyOrders)
    given = stamps or (lambda rank, order: known.orders.stamps_of(rank))  # type: ignore[union-attr]
    return known.with_orders(LazyOrders(NUM_RANKS, make, given))


def _watched(schedule: Schedule, asked: set[Rank]) -> Schedule:
    orders = schedule.orders
    assert isinstance(orders, LazyOrders)

    def make(rank: Rank) -> Order:
        asked.add(rank)
        return orders[rank]

    return schedule.with_orders(
        LazyOrders(len(orders), make, lambda rank, order: orders.stamps_of(rank))
    )


def _train(group: LocalGroup, schedule: Schedule) -> torch.Tensor:
    """Run a step and an evaluation; return the sum of the gradients."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(schedule.num_stages)]
    pipeline = Pipeline(make_stages(group, schedule, layers), schedule, loss_fn=mse_loss)
    x = torch.ones(NUM_MICROBATCHES, 4)
    pipeline.step(x, target=x)
    pipeline.eval(x)
    held = schedule.placement.stages_of(group.rank)
    return sum(layers[stage].linear.weight.grad.sum() for stage in held)  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ForwardOnly", "V-Half"])
def test_pipeline_makes_the_orders_of_its_rank_and_its_partners_only(name: str) -> None:
    """Also in the first step, when ranks compare schedules, and in an evaluation."""

    def main(group: LocalGroup) -> set[Rank]:
        whole = schedules.get(name)(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
        asked: set[Rank] = set()
        schedule = _watched(whole, asked)
        layers = [Layer() for _ in range(schedule.num_stages)]
        pipeline = Pipeline(make_stages(group, schedule, layers), schedule, loss_fn=mse_loss)
        x = torch.ones(NUM_MICROBATCHES, 4)
        pipeline.step(x, target=x)
        pipeline.eval(x)
        return asked

    for rank, asked in enumerate(local_ranks(NUM_RANKS, main)):
        # Rank 0 says whether the schedule trains.
        assert asked <= {0, rank - 1, rank, rank + 1}


def test_ranks_that_know_their_part_and_ranks_that_know_the_whole_agree() -> None:
    text = _one_f_one_b().to_csv()
    alike = local_ranks(NUM_RANKS, lambda group: _train(group, _one_f_one_b()))
    mixed = local_ranks(
        NUM_RANKS,
        lambda group: _train(group, Schedule.from_csv(text) if group.rank else _one_f_one_b()),
    )
    assert all(map(torch.equal, alike, mixed))


def test_ranks_that_prove_the_same_orders_by_other_stamps_agree() -> None:
    known = _one_f_one_b()

    def doubled(rank: Rank, order: Order) -> list[int]:
        assert isinstance(known.orders, LazyOrders)
        return [2 * stamp for stamp in known.orders.stamps_of(rank)]

    def main(group: LocalGroup) -> torch.Tensor:
        return _train(group, _lazy(known.orders.__getitem__, doubled if group.rank % 2 else None))

    alike = local_ranks(NUM_RANKS, lambda group: _train(group, known))
    assert all(map(torch.equal, alike, local_ranks(NUM_RANKS, main)))


@pytest.mark.parametrize("culprit", [0, 3, 5])
def test_schedule_that_differs_on_one_rank_is_noticed_by_all(culprit: int) -> None:
    """Of one size; with so few microbatches, even the orders of ranks 0 to 2 are the same."""
    gpipe = schedules.get("GPipe")(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)

    def main(group: LocalGroup) -> None:
        _train(group, gpipe if group.rank == culprit else _one_f_one_b())

    for error in errors_of(NUM_RANKS, main):
        assert isinstance(error, AgreementError)
        assert str(error).startswith("the ranks disagree on schedule (rank 0: Schedule(6 ranks, ")


def _facts(schedule: Schedule, skips: list[Skip]) -> list[RankFacts]:
    return [
        RankFacts(
            named={},
            held=[],
            is_dynamic=False,
            is_reduced=False,
            claims=[],
            skips=RankSkips({}, {}),
            orders=digest_orders(schedule, rank, skips),
        )
        for rank in range(schedule.num_ranks)
    ]


@pytest.mark.parametrize("skips", [[], [Skip(0, 5)]], ids=["plain", "with a skip"])
def test_digests_differ_wherever_an_order_or_a_stamp_does(skips: list[Skip]) -> None:
    known = _one_f_one_b()
    ours = _facts(known, skips)
    assert have_same_orders(ours)
    for culprit in range(NUM_RANKS):

        def make(rank: Rank, culprit: int = culprit) -> Order:
            order = known.orders[rank]
            return (order[1], order[0], *order[2:]) if rank == culprit else order

        def stamps(rank: Rank, order: Order, culprit: int = culprit) -> list[int]:
            assert isinstance(known.orders, LazyOrders)
            return [stamp + (rank == culprit) for stamp in known.orders.stamps_of(rank)]

        for other in (_lazy(make), _lazy(known.orders.__getitem__, stamps)):
            theirs = _facts(other, skips)
            for rank in range(NUM_RANKS):
                mixed = [*ours[:rank], theirs[rank], *ours[rank + 1 :]]
                partners = {culprit - 1, culprit, culprit + 1}
                if skips and culprit in (0, 5):
                    partners |= {0, 5}
                assert (rank not in partners) == have_same_orders(mixed)


def test_schedule_that_stamps_do_not_prove_is_refused_when_the_pipeline_is_made() -> None:
    def main(group: LocalGroup) -> None:
        orders = LazyOrders(
            1, lambda rank: [Forward(0, 0), Backward(0, 0)], lambda rank, order: [1, 1]
        )
        schedule = Schedule(orders, _one_f_one_b().placement.linear(1), 1)
        Pipeline(PipelineStage(Layer(), 0, 1, CPU, group=group), schedule, loss_fn=mse_loss)

    (error,) = errors_of(1, main)
    assert isinstance(error, ScheduleError)
    assert "0B0 has stamp 1, but the action before it has 1" in str(error)


def _count_calls(name: str, p: int, place: int) -> Counter[tuple[str, str]]:
    """The calls of our functions in one rank's third step; `place` may count from the last rank.

    Channels within a process do not count: they let all ranks run in turn.
    """
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_ours = "/penstock/" in code.co_filename and "/comm/" not in code.co_filename
        if event == "call" and is_ours:
            calls[code.co_filename, code.co_qualname] += 1

    def main(group: LocalGroup) -> None:
        schedule = schedules.get(name)(num_ranks=p, num_microbatches=2 * 12)
        layers = [Layer() for _ in range(schedule.num_stages)]
        pipeline = Pipeline(make_stages(group, schedule, layers), schedule, loss_fn=mse_loss)
        x = torch.ones(24, 4)
        for number in range(3):
            if number == 2 and group.rank == place % p:
                sys.setprofile(note)
            pipeline.step(x, target=x)
            sys.setprofile(None)

    local_ranks(p, main)
    return calls


@rotated(place=[0, 1, -2, -1], name=["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B"])
def test_calls_of_a_step_do_not_grow_with_the_number_of_ranks(name: str, place: int) -> None:
    few, many = (_count_calls(name, p, place) for p in (3, 12))
    assert sum(few.values()) > 1000
    assert not many - few
