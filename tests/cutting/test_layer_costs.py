"""Costs of layers, counted and measured, and policies that cut by them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from cut_models import CUT_MODELS
from cut_training import ROWS
from fuzzing import IS_LONG
from penstock import Balanced, LayerCost, Placement
from penstock.errors import CostError, PartitionError

WIDTH = 8


class Stack(nn.Module):
    """Layers that count, drop and average, the third much heavier than the others."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64 if i == 2 else WIDTH) for i in range(num_layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(self.up(x))))


NAMES = [*(f"layers.{i}" for i in range(6)), "head"]
X = torch.ones(4, WIDTH)
MEASURES: list[Callable[..., list[LayerCost]]] = [
    penstock.count_layers,
    lambda *args, **options: penstock.measure_layers(*args, repeats=1, **options),
]


@pytest.mark.parametrize("measure", MEASURES, ids=["counted", "measured"])
@pytest.mark.parametrize("layers", [None, ["layers", "head"]], ids=["traced", "chain"])
def test_costs_leave_everything_as_it_was(measure: Any, layers: list[str] | None) -> None:
    model = Stack()
    model(torch.rand(4, WIDTH)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    random_state, x = torch.get_rng_state(), X.clone()
    costs = measure(model, (x,), layers=layers)
    assert NAMES == [cost.name for cost in costs]
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.equal(X, x)
    assert x.grad is None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for name, param in model.named_parameters():
        assert torch.equal(grads[name], param.grad)
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("measure", MEASURES, ids=["counted", "measured"])
@pytest.mark.parametrize("layers", [None, ["layers", "head"]], ids=["traced", "chain"])
def test_costs_tell_bytes_of_parameters_and_activations(
    measure: Any, layers: list[str] | None
) -> None:
    costs = measure(Stack(), (X,), layers=layers)
    for cost, module in zip(costs, [*Stack().layers, Stack().head], strict=True):
        assert sum(p.nbytes for p in module.parameters()) == cost.parameter_bytes
        assert cost.time > 0
        assert cost.activation_bytes > 0
    assert costs[2].activation_bytes == max(cost.activation_bytes for cost in costs)


def test_parameter_that_two_layers_use_counts_for_the_first() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    costs = penstock.count_layers(model, (X,))
    assert [model[0].weight.nbytes, 0] == [cost.parameter_bytes for cost in costs]


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * h


def test_activation_that_is_kept_twice_counts_once() -> None:
    (cost,) = penstock.count_layers(nn.Sequential(Squared()), (X,), layers=["0"])
    assert 2 * X.nbytes == cost.activation_bytes  # The inputs of both operations.


@pytest.mark.parametrize("layers", [None, ["layers", "head"]], ids=["traced", "chain"])
def test_counts_are_the_same_on_the_meta_device(layers: list[str] | None) -> None:
    with torch.device("meta"):
        empty = Stack()
    expected = penstock.count_layers(Stack(), (X,), layers=layers)
    assert expected == penstock.count_layers(empty, (X.to("meta"),), layers=layers)
    assert expected[2].time == max(cost.time for cost in expected)


@pytest.mark.fuzz
@pytest.mark.parametrize("number", range(0, len(CUT_MODELS), 1 if IS_LONG else 3))
def test_every_model_can_be_balanced_and_gives_the_same(number: int) -> None:
    name = list(CUT_MODELS)[number]
    model = CUT_MODELS[name].model(2).eval()
    args, kwargs, _ = CUT_MODELS[name].batch(ROWS, 0)
    for num_stages in (2, 4) if IS_LONG else (4 if number % 2 else 2,):
        policy = Balanced(num_stages)
        pipe = penstock.cut(model, args, kwargs, split_policy=policy)
        assert num_stages == pipe.num_stages
        torch.testing.assert_close(pipe(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=0)


class Chosen(nn.Module):
    """Takes values by what they are, so that shapes alone do not tell how many."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].sum()


def test_costs_that_depend_on_values_cannot_be_counted_but_measured() -> None:
    model = nn.Sequential(Chosen(), nn.Linear(WIDTH, 3))
    expected = (
        r"costs cannot be counted from shapes: the result of aten\.\S+ depends on the values of "
        r"its input\. Give the costs: penstock\.Balanced\(num_stages, costs=…\), with the result of"
    )
    with pytest.raises(CostError, match=expected):
        penstock.count_layers(model, (X,), layers=["0", "1"])
    assert 2 == len(penstock.measure_layers(model, (X,), layers=["0", "1"], repeats=1))


def test_policy_balances_by_cost() -> None:
    policy = Balanced(2)
    pipe = penstock.cut(Stack(), (X,), split_policy=policy)
    heavy = [i for i in range(2) if _has(pipe, i, "layers.2.up.weight")]
    assert 1 == len(heavy)
    assert 6 > sum(_has(pipe, heavy[0], f"layers.{i}.up.weight") for i in range(6))


def test_policy_with_costs_cuts_where_they_say() -> None:
    costs = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0]
    pipe = penstock.cut(Stack(), (X,), split_policy=Balanced(2, costs=costs))
    assert ["head.weight", "head.bias"] == list(pipe.get_stage_module(1).state_dict())


def test_policy_takes_measured_costs() -> None:
    model = Stack()
    costs = penstock.measure_layers(model, (X,), repeats=1)
    pipe = penstock.cut(model, (X,), split_policy=Balanced(3, costs=costs))
    assert 3 == pipe.num_stages


def test_policy_on_the_meta_device_cuts_as_elsewhere() -> None:
    with torch.device("meta"):
        empty = Stack()
    expected = penstock.cut(Stack(), (X,), split_policy=Balanced(3))
    actual = penstock.cut(empty, (X.to("meta"),), split_policy=Balanced(3))
    assert expected.cut == actual.cut
    model = Stack().eval()
    for index in range(3):
        module = actual.get_stage_module(index).to_empty(device="cpu").eval()
        module.load_state_dict({key: model.state_dict()[key] for key in module.state_dict()})
    assert torch.equal(model(X), actual(X))


def test_marks_of_the_model_do_not_count_if_there_is_a_policy() -> None:
    model = CUT_MODELS["marked"].model(8)
    args, _, _ = CUT_MODELS["marked"].batch(ROWS, 0)
    assert 2 == penstock.cut(model, args, split_policy=Balanced(2)).num_stages
    assert 8 == len(penstock.measure_layers(model, args, repeats=1))


def test_memory_cap_moves_the_cut() -> None:
    layers = [LayerCost(str(i), 1.0, 0.0, 10.0) for i in range(4)]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    # Of 1F1B's two stages the first holds two microbatches: at most one layer fits under 20.
    for cap, expected in ((1e9, ["2", "3"]), (30.0, ["1", "2", "3"])):
        policy = Balanced(2, costs=layers, memory=cap)
        for pipe in (
            penstock.cut(model, (X,), split_policy=policy),
            penstock.cut_between_modules(model, policy),
        ):
            assert expected == list(dict(pipe.get_stage_module(1).named_children()))


def test_memory_cap_that_nothing_meets() -> None:
    policy = Balanced(2, memory=10.0)
    with pytest.raises(PartitionError, match="10"):
        penstock.cut(Stack(), (X,), split_policy=policy)


def test_placement_in_a_v_balances_ranks_not_stages() -> None:
    costs = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    policy = Balanced(4, costs=costs, placement=Placement.v(num_ranks=2))
    pipe = penstock.cut(Stack(), (X,), split_policy=policy)
    times = [
        sum(cost for i, cost in enumerate(costs[:6]) if _has(pipe, s, f"layers.{i}.up.weight"))
        + costs[6] * _has(pipe, s, "head.weight")
        for s in range(4)
    ]
    assert 5.0 == max(times[0] + times[3], times[1] + times[2])


def _has(pipe: penstock.CutModel, stage: int, name: str) -> bool:
    return name in pipe.get_stage_module(stage).state_dict()
