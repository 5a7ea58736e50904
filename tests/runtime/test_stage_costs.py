"""Measured cost tables: the same on all ranks, of the right things, with nothing left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from local_steps import mean_square, mlp, mlp_batch
from penstock import CostTable, LocalGroup, Placement, local_ranks
from penstock.comm import Describe, Transfer
from penstock.comm.channels import both_ways
from penstock.costs import EdgeCost
from penstock.errors import AgreementError, CostError
from penstock.ir import Backward, Forward, Message
from penstock.runtime.measuring import message_times
from penstock.runtime.measuring.measuring_steps import receipt_s
from penstock.runtime.messages.forms import Form, TensorForm
from skip_models import Skip, SkipStage
from stage_training import make_stages

PLACEMENTS = [Placement(ranks) for ranks in ((0,), (0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 1))]
ROW_BYTES = 2 * 6 * 8
"""Of a microbatch of two rows between stages of `mlp`."""


def measure(
    modules: list[nn.Module],
    placement: Placement,
    make: Callable[..., Any] = make_stages,
    **options: Any,
) -> list[CostTable]:
    """The table that each rank got."""
    batch = mlp_batch()

    def main(group: LocalGroup) -> CostTable:
        stages = make(group, modules, placement.stages_of(group.rank))
        options.setdefault("repeats", 1)
        return penstock.measure_costs(
            stages, 4, mean_square, *batch.args, target=batch.target, **options
        )

    return local_ranks(placement.num_ranks, main)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: str(placement.ranks))
def test_all_ranks_get_one_table_with_all_stages_and_edges(placement: Placement) -> None:
    tables = measure(mlp(placement.num_stages), placement)
    costs = tables[0]
    assert [costs] * placement.num_ranks == tables
    assert placement.num_stages == costs.num_stages
    times = (costs.forward, costs.backward_input, costs.backward_weight, costs.backward)
    assert all(time > 0 for kind in times for time in kind)
    assert all(held >= 2 * ROW_BYTES for held in costs.after_forward)
    assert all(held > 0 for held in costs.after_input)
    pairs = zip(placement.ranks, placement.ranks[1:], strict=False)
    assert [ROW_BYTES * (a != b) for a, b in pairs] == list(costs.message_bytes)
    for edge, size in enumerate(costs.message_bytes):
        assert size > 0 or costs.delay[edge] == 0
    assert costs == CostTable.from_json(costs.to_json())


class Stateful(nn.Module):
    """Draws random numbers, and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.layers(x)


def test_gradients_buffers_and_random_state_are_left_as_they_were() -> None:
    modules: list[nn.Module] = [Stateful().double() for _ in range(2)]
    params = [param for module in modules for param in module.parameters()]
    grads = [torch.randn_like(param) if number % 2 else None for number, param in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    values = [None if grad is None else grad.clone() for grad in grads]
    random_state = torch.get_rng_state()
    batch = mlp_batch()
    torch.set_rng_state(random_state)
    x = batch.args[0].requires_grad_()

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [group.rank])
        penstock.measure_costs(stages, 4, mean_square, x, target=batch.target, repeats=1)

    local_ranks(2, main)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    for grad, value in zip(grads, values, strict=True):
        assert (grad is None) == (value is None)
        assert grad is None or value is None or torch.equal(value, grad)
    assert [0.0, 0.0] == [module.count.item() for module in modules]
    assert torch.equal(random_state, torch.get_rng_state())
    assert x.grad is None


def test_parameters_of_the_loss_are_left_as_they_were() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, outputs: Tensor, target: Tensor, *, power: int) -> Tensor:
            return (self.scale * (outputs - target) ** power).mean()

    loss, batch, modules = Loss(), mlp_batch(), mlp(1)

    def main(group: LocalGroup) -> CostTable:
        return penstock.measure_costs(
            make_stages(group, modules, [0]),
            4,
            loss,
            *batch.args,
            target=batch.target,
            loss_kwargs={"power": 2},
        )

    local_ranks(1, main)
    assert loss.scale.grad is None


@pytest.mark.filterwarnings("ignore:.* compiled by torch.compile")
def test_stage_compiled_by_torch_holds_its_weight_gradients_after_the_input_backward() -> None:
    modules = mlp(2)
    modules[1].compile(backend="aot_eager")
    costs, _ = measure(modules, Placement.linear(2))
    assert sum(param.numel() * 8 for param in modules[1].parameters()) == costs.after_input[1]
    assert costs.after_forward[1] > ROW_BYTES


class _Spike(torch.autograd.Function):
    """An identity that needs memory of its own, only while it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, int]) -> Tensor:
        ctx.size = sizes[1]
        torch.zeros(sizes[0], dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.zeros(ctx.size, dtype=torch.uint8)
        return grad.clone(), None


class Spiky(nn.Module):
    """Layers with an identity between them that needs 10 kB forward and 20 kB backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        z: Tensor = self.layers[1](_Spike.apply(y, (10_000, 20_000)))
        return z


def test_memory_that_actions_need_while_they_run_is_measured() -> None:
    costs = measure([Spiky(), Spiky()], Placement.linear(2))[0]
    weight = 6 * 6 * 8
    for stage in range(2):
        held = costs.after_forward[stage]
        assert held < 1000
        assert 10_000 < costs.during_forward[stage] < 10_000 + held
        assert 20_000 <= costs.during_backward[stage] < 21_000
    # The first stage has no input gradient to compute: its whole backward is in W.
    assert costs.during_input[0] < 1000
    # Bytes: the output gradient arrives with B, but before W.
    assert costs.during_weight[0] == pytest.approx(costs.during_backward[0], abs=ROW_BYTES)
    assert weight <= costs.during_weight[1] < 1000 < 20_000 < costs.during_input[1]


def test_memory_of_a_recomputed_block_counts_in_the_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(8)))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    costs = measure([Checkpointed(), Checkpointed()], Placement.linear(2))[0]
    recomputed = 7 * ROW_BYTES
    for stage in range(2):
        assert costs.after_forward[stage] < recomputed <= costs.during_backward[stage]
    # Bytes: the output gradient arrives with B, but before W.
    assert costs.during_weight[0] == pytest.approx(costs.during_backward[0], abs=ROW_BYTES)
    assert recomputed <= costs.during_input[1] <= costs.after_input[1] + 4 * ROW_BYTES


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_gradients_of_weights_do_not_count(num_microbatches: int) -> None:
    """They are made by the first backward, and stay; only one product of them is made at a time."""
    width, depth = 130, 20
    modules = [nn.Sequential(*(nn.Linear(width, width).double() for _ in range(depth)))]
    x = torch.randn(4, width, dtype=torch.float64, requires_grad=True)

    def main(group: LocalGroup) -> CostTable:
        stages = make_stages(group, modules, [0])
        return penstock.measure_costs(
            stages, num_microbatches, mean_square, x, target=torch.zeros_like(x), repeats=1
        )

    costs = local_ranks(1, main)[0]
    product, rows = 8 * width * width, 8 * width * 4
    for during in (costs.during_input, costs.during_weight, costs.during_backward):
        assert during[0] < 2 * product + depth * rows


def test_values_that_skip_stages_and_dynamic_shapes_are_measured() -> None:
    modules: list[nn.Module] = [
        SkipStage(index, 4, [Skip(0, 2), Skip(1, 3)], ()).double() for index in range(4)
    ]

    def make(group: LocalGroup, modules: list[Any], held: tuple[int, ...]) -> Any:
        return [
            penstock.PipelineStage(
                modules[index],
                index,
                4,
                "cpu",
                group=group,
                dynamic_shapes=True,
                skips_in=modules[index].skips_in,
                skips_out=modules[index].skips_out,
            )
            for index in held
        ]

    first, second = measure(modules, Placement.v(2), make)
    assert first == second


def test_stage_without_tensors_to_send_is_measured() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> tuple[()]:
            return ()

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.ones(2, 6, dtype=torch.float64))

        def forward(self) -> Tensor:
            return self.start * 2

    costs, _ = measure([Silent(), Start()], Placement.linear(2))
    assert (0,) == costs.message_bytes


def test_prediction_follows_from_the_table() -> None:
    costs, _ = measure(mlp(2), Placement.linear(2), repeats=3)
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4)
    busy = max(sum(costs.forward), sum(costs.backward))
    assert penstock.simulate(schedule, costs).makespan > busy


@pytest.mark.parametrize("name", ["repeats", "warm_up"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_number_of_steps_that_makes_no_sense_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(CostError, match=f"{name} is {value}. Expected a whole number, at least 1."):
        measure(mlp(1), Placement.linear(1), **{name: value})


def test_ranks_that_disagree_on_the_steps_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        stages, batch = make_stages(group, mlp(2), [group.rank]), mlp_batch()
        with pytest.raises(AgreementError, match=r"disagree on schedule .*repeats 2"):
            penstock.measure_costs(stages, 4, mean_square, *batch.args, repeats=1 + group.rank)

    local_ranks(2, main)


def test_target_that_needs_a_gradient_gets_none() -> None:
    batch, modules = mlp_batch(), mlp(1)
    target = batch.target.clone().requires_grad_()

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [0])
        penstock.measure_costs(stages, 4, mean_square, *batch.args, target=target, repeats=1)

    local_ranks(1, main)
    assert target.grad is None


def test_costs_without_a_loss_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        stages = make_stages(group, mlp(1), [0])
        with pytest.raises(CostError, match="loss_fn is None, but without a loss there is no"):
            penstock.measure_costs(stages, 4, None, *mlp_batch().args)  # type: ignore[arg-type]

    local_ranks(1, main)


def test_buffers_that_come_go_and_grow_are_as_before() -> None:
    class Caching(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.register_buffer("grows", torch.zeros(1))
            self.register_buffer("goes", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.grows = torch.cat([self.grows, self.grows])
            if "goes" in self._buffers:
                del self.goes
            self.register_buffer("comes", torch.ones(3))
            return super().forward(x)

    module = Caching().double()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    measure([module], Placement.linear(1))
    found = module.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_compiled_function_in_a_stage_is_still_compiled_afterwards() -> None:
    """Where operations are watched, torch.compile gives up a function for good."""
    runs = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    @torch.compile(backend=backend)
    def double(x: Tensor) -> Tensor:
        return x * 2

    class Calling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(double(x))  # Of a leaf: torch warns of others.

    measure([Calling(6, 6).double()], Placement.linear(1))
    before = len(runs)
    double(torch.ones(2, 6, dtype=torch.float64))
    assert before < len(runs)


def test_stage_that_fails_leaves_gradients_as_they_were() -> None:
    class Failing(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            if self.count > 6:
                raise RuntimeError("that is enough")
            return super().forward(x)

    module = Failing(6, 6).double()
    module.weight.grad = grad = torch.ones_like(module.weight)
    batch = mlp_batch()

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, [module], [0])
        with pytest.raises(RuntimeError, match="that is enough"):
            penstock.measure_costs(stages, 4, mean_square, *batch.args, target=batch.target)

    local_ranks(1, main)
    assert module.weight.grad is grad
    assert torch.equal(torch.ones_like(grad), grad)


def test_input_from_a_stage_of_the_same_rank_counts_once() -> None:
    """That stage holds it as its output already."""
    apart, together = (
        measure(mlp(4), Placement(ranks))[0].after_forward for ranks in ((0, 1, 2, 3), (0, 1, 1, 0))
    )
    assert apart[2] - ROW_BYTES == together[2]


class Shift(nn.Module):
    """Its input and its parameter have one gradient between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_gradient_that_goes_on_counts_while_the_weight_backward_needs_it_too() -> None:
    modules = [*mlp(1), Shift(), *mlp(1)]
    costs = measure(modules, Placement((0, 1, 2)))[0]
    assert ROW_BYTES == costs.after_input[1]


def test_gradients_that_a_hook_writes_to_are_put_back() -> None:
    """DistributedDataParallel keeps gradients as views of its buckets, and writes to these."""
    modules = mlp(2)
    weight = modules[0].up.weight
    bucket = torch.ones_like(weight)
    weight.grad = bucket.view_as(weight)

    def reduce(param: Tensor) -> None:
        bucket.zero_()

    weight.register_post_accumulate_grad_hook(reduce)
    measure(modules, Placement((0, 1)))
    assert torch.equal(torch.ones_like(weight), weight.grad)


def test_action_takes_the_message_of_the_edge_that_it_comes_by() -> None:
    receipts_s = {0: 1.0, 1: 2.0}
    assert 1.0 == receipt_s(Forward(1, 0), receipts_s)
    assert 2.0 == receipt_s(Backward(1, 0), receipts_s)
    assert 0.0 == receipt_s(Forward(0, 0), receipts_s)


SHORT_S = 2.0**-10  # The end that answers sleeps for as long as this takes; sums are exact.


class _Slow:
    """A receive that takes a while by the clock of the test, once its message is there."""

    def __init__(self, transfer: Transfer, clock: list[float]) -> None:
        self._transfer, self._clock = transfer, clock

    def wait(self, described: Describe) -> None:
        self._transfer.wait(described)
        self._clock[0] += 2 * SHORT_S


def test_delay_is_what_sending_and_receiving_leave_of_half_a_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There and back are two sends and two receives, with nothing in between."""
    clock = [0.0]
    monkeypatch.setattr(message_times, "now_s", lambda device: clock[0])
    form = Form.of_tree((TensorForm(torch.Size([3]), torch.float32, True),))

    def main(group: LocalGroup) -> Any:
        comm = group.connect()
        comm.open(both_ways([(0, 1)]))
        send, recv = comm.send, comm.recv

        def slow_send(tensor: Tensor, receiver: int) -> Transfer:
            clock[0] += SHORT_S
            return send(tensor, receiver)

        comm.send = slow_send  # type: ignore[method-assign]
        comm.recv = lambda *args: _Slow(recv(*args), clock)  # type: ignore[method-assign]
        forms = {Message(0, 1, 0): form}
        return message_times.measure_edges(comm, torch.device("cpu"), Placement((0, 1)), forms)

    expected = {0: message_times.Edge(EdgeCost(0.0, 12), 2 * SHORT_S)}
    assert [expected, expected] == local_ranks(2, main)
