"""Schedules go both ways between torch's pipelining and ours, through the text format."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from penstock import Placement, Schedule, schedules
from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    BackwardWeight,
    Message,
    Overlap,
    Recompute,
    ReduceGrads,
    Reshard,
    Send,
    Unshard,
)
from penstock.ir.action import SHARDING_TYPES, compute_parts, is_compute
from penstock.ir.csv_text import parse_cell
from penstock.passes import add_comms
from penstock.schedules import REGISTRY, Generator, Shape
from shapes import make, shapes

TorchOrders = dict[int, list[Any]]

# What torch checks has backwards.
TRAINING = [generator for generator in REGISTRY if generator.name != "ForwardOnly"]
every_training = pytest.mark.parametrize("generator", TRAINING, ids=lambda each: each.name)


def to_torch(schedule: Schedule) -> TorchOrders:
    lines = schedule.to_csv().splitlines()
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(lines)
    }


def to_text(orders: TorchOrders) -> str:
    """As torch's `_dump_csv` writes it."""
    lines = [
        ",".join("" if action is None else str(action) for action in orders[rank])
        for rank in sorted(orders)
    ]
    return "\n".join(lines) + "\n"


def small_shapes(generator: Generator) -> list[Shape]:
    return shapes(
        generator, ranks=[1, 2, 3, 4], microbatches=[1, 2, 3, 4, 6, 9], stages_per_rank=[1, 2, 3]
    )


@every_training
def test_our_schedule_is_read_and_accepted_by_torch(generator: Generator) -> None:
    for shape in small_shapes(generator):
        schedule = make(generator, shape)
        orders = to_torch(schedule)
        assert schedule == Schedule.from_csv(to_text(orders))
        holders = torch_schedules._validate_schedule(orders, shape.p, schedule.num_stages, shape.m)
        assert dict(enumerate(schedule.placement.ranks)) == holders


@every_training
def test_our_schedule_with_comms_runs_in_torchs_simulation(generator: Generator) -> None:
    for shape in small_shapes(generator):
        schedule = add_comms(make(generator, shape))
        orders = to_torch(schedule)
        assert schedule == Schedule.from_csv(to_text(orders))
        done = torch_schedules._simulate_comms_compute(
            {rank: list(_without_pairs(order)) for rank, order in orders.items()},
            lambda stage, ranks=schedule.placement.ranks: ranks[stage],
            schedule.num_stages,
        )
        ran = {rank: [action for action in done[rank] if action is not None] for rank in done}
        assert {rank: list(_without_pairs(order)) for rank, order in orders.items()} == ran


def _without_pairs(order: Iterable[Any]) -> Iterable[Any]:
    """torch's simulation does not know pairs; it can run their halves one after the other."""
    for action in order:
        yield from action.sub_actions or (action,)


def torch_orders(
    kind: type, shape: Shape, finish: Callable[[Any], TorchOrders] | None = None
) -> TorchOrders:
    """What `kind` would run. It needs no stages for that, so it is made without them."""
    p, m, v = shape
    made = kind.__new__(kind)
    made.pp_group_size = p
    made._stages = [None] * v
    made.n_local_stages = v
    made.num_stages = p * v
    made._n_microbatches = m
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}
    return made.pipeline_order if finish is None else finish(made)


def _loop_shapes(*, rounds: bool) -> list[Shape]:
    """If `rounds`, only those that torch takes: as many microbatches in each round."""
    every = [Shape(p, m, v) for p in (1, 2, 3, 4) for m in (1, 2, 4, 6, 9, 10) for v in (1, 2, 3)]
    return [shape for shape in every if not rounds or shape.m % max(1, shape.m // shape.p) == 0]


def _v_shapes(*, least_per_rank: int) -> list[Shape]:
    every = [Shape(p, m, 2) for p in (1, 2, 3, 4) for m in (1, 2, 5, 8, 11)]
    return [shape for shape in every if shape.m >= least_per_rank * shape.p]


def _interleaved_zero_bubble(shape: Shape) -> TorchOrders:
    return torch_orders(
        torch_schedules.ScheduleInterleavedZeroBubble,
        shape,
        lambda made: made._add_bubbles_to_actions(shape.p * shape.v),
    )


# By our name: the shapes that torch takes, and the orders that it makes for one.
TORCH: dict[str, tuple[list[Shape], Callable[[Shape], TorchOrders]]] = {
    "LoopedBFS": (
        _loop_shapes(rounds=False),
        partial(torch_orders, torch_schedules.ScheduleLoopedBFS),
    ),
    "Interleaved1F1B": (
        _loop_shapes(rounds=True),
        partial(torch_orders, torch_schedules.ScheduleInterleaved1F1B),
    ),
    "InterleavedZeroBubble": (_loop_shapes(rounds=True), _interleaved_zero_bubble),
    "ZB-V": (
        _v_shapes(least_per_rank=0),
        partial(torch_orders, torch_schedules.ScheduleZBVZeroBubble),
    ),
    "DualPipeV": (
        _v_shapes(least_per_rank=2),
        partial(torch_orders, torch_schedules.ScheduleDualPipeV),
    ),
}
every_torch_schedule = pytest.mark.parametrize("name", TORCH)


def from_torch(name: str) -> Iterator[tuple[Shape, TorchOrders]]:
    shapes_taken, orders_of = TORCH[name]
    assert shapes_taken
    for shape in shapes_taken:
        yield shape, orders_of(shape)


@every_torch_schedule
def test_torchs_schedule_is_read_and_verified_here(name: str) -> None:
    for shape, orders in from_torch(name):
        schedule = Schedule.from_csv(to_text(orders))
        schedule.verify()
        assert shape.m == schedule.num_microbatches
        assert schedules.get(name).placement(shape) == schedule.placement


def weight_backwards(schedule: Schedule, stage: int) -> list[int]:
    """The microbatches whose weight gradients a stage adds, in order."""
    (order,) = (order for order in schedule.orders if any(_adds(a, stage) for a in order))
    return [part.mb for action in order for part in _adds(action, stage)]


def _adds(action: Any, stage: int) -> list[Any]:
    kinds = Backward | BackwardWeight
    parts = compute_parts(action)
    return [part for part in parts if isinstance(part, kinds) and part.stage == stage]


@pytest.mark.parametrize("name", sorted(TORCH.keys() - {"LoopedBFS"}))
def test_gradients_are_summed_in_torchs_order(name: str) -> None:
    """So that a program that moves from torch gets the same bits.

    torch's LoopedBFS begins with the last microbatch; ours sums as a loop over microbatches does.
    """
    for shape, orders in from_torch(name):
        torchs, ours = Schedule.from_csv(to_text(orders)), make(schedules.get(name), shape)
        for stage in range(ours.num_stages):
            assert weight_backwards(torchs, stage) == weight_backwards(ours, stage)


def lower_as_torch(orders: TorchOrders, placement: Placement, num_microbatches: int) -> TorchOrders:
    """What torch's runtime makes of `orders`: sharding, then sends and receives."""
    sharded = {
        rank: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(orders[rank]), num_microbatches
        )
        for rank in orders
    }
    return torch_schedules._add_send_recv(
        sharded, lambda stage: placement.ranks[stage], placement.num_stages
    )


@every_torch_schedule
def test_torchs_lowered_schedule_is_read_and_verified_here(name: str) -> None:
    for shape, orders in from_torch(name):
        text = to_text(lower_as_torch(orders, schedules.get(name).placement(shape), shape.m))
        assert all(cell in text for cell in ("0UNSHARD", "0RESHARD", "0REDUCE_GRAD"))
        schedule = Schedule.from_csv(text)
        schedule.verify()
        assert (shape.p > 1) == schedule.has_comms
        assert schedule.has_sharding
        computes = [filter(is_compute, order) for order in schedule.orders]
        assert Schedule.from_csv(to_text(orders)) == schedule.with_orders(computes)
        assert without_waits(text) == schedule.to_csv()


def without_waits(text: str) -> str:
    """Leave out the waits that torch 2.15 added to its text; older texts have none."""
    lines = ([cell for cell in line.split(",") if "WAIT_" not in cell] for line in text.split("\n"))
    return "\n".join(map(",".join, lines))


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_actions_of_a_whole_stage_go_both_ways(kind: type) -> None:
    read = torch_schedules._Action.from_str(str(kind(12)))
    assert (12, None, None) == (read.stage_index, read.microbatch_index, read.sub_actions)
    assert str(kind(12)) == str(read)
    assert kind(12) == parse_cell(str(read))


def test_torchs_names_of_sharding_are_ours() -> None:
    types = torch_schedules._ComputationType
    for kind, torchs in (
        (Unshard, types.UNSHARD),
        (Reshard, types.RESHARD),
        (ReduceGrads, types.REDUCE_GRAD),
    ):
        assert torchs is torch_schedules._Action.from_str(str(kind(0))).computation_type


def test_torchs_deferred_receives_are_rejected_where_they_overtake_each_other() -> None:
    """With `defer_pp_recv`, torch may receive in another order than the other rank sends in."""
    shape = Shape(3, 8, 2)
    placement = Placement.v(3)
    orders = torch_orders(torch_schedules.ScheduleZBVZeroBubble, shape)
    lowered = lower_as_torch(orders, placement, shape.m)
    deferred = torch_schedules._defer_recv_ops(lowered, lambda stage: placement.ranks[stage])
    with pytest.raises(ScheduleError, match="arrive in the order in which they are sent"):
        Schedule.from_csv(to_text(deferred)).verify()


def test_interleaved_1f1b_is_torchs_where_ranks_divide_microbatches() -> None:
    generator = schedules.get("Interleaved1F1B")
    compared = [(s, orders) for s, orders in from_torch(generator.name) if s.m % s.p == 0]
    assert len(compared) > 10
    for shape, orders in compared:
        expected = Schedule.from_csv(to_text(orders))
        assert expected == make(generator, shape), shape


def test_dual_pipe_v_is_torchs() -> None:
    generator = schedules.get("DualPipeV")
    for shape, orders in from_torch(generator.name):
        expected = Schedule.from_csv(to_text(orders))
        assert expected == make(generator, shape), shape
        assert any(isinstance(action, Overlap) for action in expected.orders[0])


def test_zb_v_is_torchs_but_for_the_order_of_weights_at_the_end() -> None:
    generator = schedules.get("ZB-V")
    compared = [(s, orders) for s, orders in from_torch(generator.name) if s.m >= 2 * s.p - 1]
    assert len(compared) > 5
    for shape, orders in compared:
        expected = Schedule.from_csv(to_text(orders))
        made = make(generator, shape)
        for theirs, ours in zip(expected.orders, made.orders, strict=True):
            assert [_kind(action) for action in theirs] == [_kind(action) for action in ours]
            assert set(theirs) == set(ours)


def _kind(action: Any) -> Any:
    """The action, or only that it is a W."""
    return BackwardWeight if isinstance(action, BackwardWeight) else action


@pytest.mark.parametrize(
    "name",
    [
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ],
)
def test_schedule_is_found_by_the_name_of_torchs_class(name: str) -> None:
    class_name = torch_schedules.get_schedule_class(name).__name__
    assert f"Schedule{name}" == class_name
    assert schedules.get(name) is schedules.get(class_name)


def test_torch_refuses_recomputation() -> None:
    with pytest.raises(RuntimeError, match="Invalid action string: 0R3"):
        torch_schedules._Action.from_str(str(Recompute(0, 3)))


def test_torch_takes_a_message_that_skips_stages_for_one_to_the_neighbour() -> None:
    """It ignores the end of the cell, so it must not be given such a file: the docs say so."""
    skipping, plain = Send(Message(0, 3, 1)), Send(Message(0, 1, 1))
    assert str(plain) == str(torch_schedules._Action.from_str(str(skipping)))
