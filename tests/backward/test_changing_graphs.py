"""Microbatches whose graphs differ: a plan made for one must not be applied to another."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backward.mechanisms import MECHANISMS, AbstractPass, autograd
from penstock.backward.graph_pattern import (
    INPUT,
    LEAF,
    OTHER,
    PER_EDGE,
    PRODUCT,
    Pattern,
    read_graph,
)
from penstock.backward.harvesting import harvest

WIDTH = 6
Mechanism = Callable[[nn.Module], Callable[..., AbstractPass]]


class Branching(nn.Module):
    """A stage that takes the path that the data names: the first number of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.raw = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        path = PATHS[int(x.detach().flatten()[0])]
        return path(self, self.norm(x))


def _hooked(stage: Branching, x: Tensor) -> Tensor:
    out = torch.addmm(stage.first.bias, x.flatten(0, -2), stage.first.weight.t())
    out.register_hook(lambda grad: grad * 3)
    return out.view_as(x)


def _scaled(stage: Branching, x: Tensor, alpha: float) -> Tensor:
    """The same graph for every `alpha`."""
    rows, weight = x.flatten(0, -2), stage.first.weight.t()
    return torch.addmm(stage.first.bias, rows, weight, alpha=alpha, beta=3 - alpha).view_as(x)


def _joined(stage: Branching, x: Tensor, urgent: Tensor) -> Tensor:
    """Two weights that only autograd can serve, as one of them is also used by a multiplication."""
    y = F.linear(stage.first(x), stage.raw) * urgent.sum(0)
    return F.linear(y, stage.raw + stage.first.weight) + F.linear(y, stage.first.weight + stage.raw)


def _three_uses(stage: Branching, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same graph for every order, but autograd adds the three gradients in another order."""
    made = {}
    for number in order:
        made[number] = F.linear(x * (number + 1.3), stage.raw)
    return made[0] * 0.1 + made[1] * 7 + made[2] * 0.3


PATHS: list[Callable[[Branching, Tensor], Tensor]] = [
    lambda stage, x: stage.second(F.gelu(stage.first(x))),
    lambda stage, x: stage.first(F.gelu(stage.second(x))),
    lambda stage, x: stage.first(F.gelu(stage.first(x))),
    lambda stage, x: stage.first(stage.first(stage.first(stage.second(x)))),
    lambda stage, x: x @ stage.raw + F.linear(x, stage.raw),
    lambda stage, x: _scaled(stage, x, alpha=2),
    lambda stage, x: _scaled(stage, x, alpha=1),
    _hooked,
    lambda stage, x: _joined(stage, x, stage.raw),
    lambda stage, x: _joined(stage, x, stage.first.weight),
    lambda stage, x: _three_uses(stage, x, (0, 1, 2)),
    lambda stage, x: _three_uses(stage, x, (2, 0, 1)),
    lambda stage, x: _three_uses(stage, x, (1, 2, 0)),
    lambda stage, x: checkpoint(lambda y: F.linear(y, stage.raw).tanh(), x, use_reentrant=False),
    lambda stage, x: F.linear(x, stage.raw).tanh(),
]


def _microbatch(path: int, rows: int, seed: int) -> Tensor:
    x = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0] = path + 0.5
    return x.requires_grad_()


def _grads(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in stage.named_parameters()}


def _assert_equal(expected: nn.Module, actual: nn.Module) -> None:
    other = _grads(actual)
    for name, grad in _grads(expected).items():
        found = other[name]
        if grad is None or found is None:
            assert grad is found, name
        else:
            assert torch.equal(grad, found), name


class Pair:
    """A stage under test and its copy, which plain autograd runs."""

    def __init__(self, mechanism: Mechanism) -> None:
        torch.manual_seed(0)
        self.stages = Branching(), Branching()
        self.stages[1].load_state_dict(self.stages[0].state_dict())
        self._plain, self._split = autograd(self.stages[1]), mechanism(self.stages[0])

    def forward(
        self, path: int, rows: int = 3, seed: int = 0
    ) -> Callable[[], Callable[[], object]]:
        """Run both forwards; return what runs both backwards, except for the weight half."""
        plain = self._plain((_microbatch(path, rows, seed),), {})
        split = self._split((_microbatch(path, rows, seed),), {})
        grad = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed + 1))

        def backward() -> Callable[[], object]:
            (expected,) = plain.backward(grad)
            (found,), run_weights = split.backward_input(grad)
            assert expected is not None
            assert found is not None
            assert torch.equal(expected, found)
            return run_weights

        return backward

    def step(self, path: int, rows: int = 3, seed: int = 0) -> None:
        """Run both halves, and compare all gradients."""
        self.forward(path, rows, seed)()()
        _assert_equal(self.stages[1], self.stages[0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_each_microbatch_takes_another_path(mechanism: Mechanism, stride: int) -> None:
    """Every path comes several times, after different ones, with one and with other row counts."""
    pair = Pair(mechanism)
    for number in range(3 * len(PATHS)):
        pair.step(number * stride % len(PATHS), rows=3 + number // len(PATHS), seed=number)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_paths_alternate_while_weight_halves_wait(mechanism: Mechanism) -> None:
    pair = Pair(mechanism)
    waiting: list[Callable[[], object]] = []
    for number in range(2 * len(PATHS)):
        waiting.append(pair.forward(number * 4 % len(PATHS), seed=number)())
        if len(waiting) > 2:
            waiting.pop(0)()
    for run_weights in waiting:
        run_weights()
    _assert_equal(pair.stages[1], pair.stages[0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("path", range(len(PATHS)))
def test_parameters_are_frozen_and_trained_again(mechanism: Mechanism, path: int) -> None:
    pair = Pair(mechanism)
    pair.step(path)
    for name in ("first.weight", "first.bias", "raw", "norm.weight"):
        for is_trained in (False, True):
            for stage in pair.stages:
                stage.get_parameter(name).requires_grad_(is_trained)
            pair.step(path, seed=int(is_trained))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("path", range(len(PATHS)))
def test_hooks_are_added_between_microbatches(mechanism: Mechanism, path: int) -> None:
    """Hooks on parameters, and on the output of a layer, which its pre-hook must see."""
    pair = Pair(mechanism)
    pair.step(path)
    handles = []
    for stage in pair.stages:
        handles.append(stage.raw.register_hook(lambda grad: grad * 2))
        handles.append(stage.first.weight.register_hook(lambda grad: grad * 2))
        handles.append(stage.first.register_forward_hook(_double_grads))
    pair.step(path)
    for handle in handles:
        handle.remove()
    pair.step(path)


def _double_grads(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
    out.register_hook(lambda grad: grad * 2)


def _unpacked_once() -> saved_tensors_hooks:
    """Let saved tensors be unpacked once only, as a checkpoint or an offload may demand."""

    def unpack(packed: list[Tensor]) -> Tensor:
        return packed.pop()

    return saved_tensors_hooks(lambda tensor: [tensor], unpack)


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("context", "path"),
    [(_unpacked_once, path) for path in range(len(PATHS))]
    # Under autocast, torch.addmm does not take a float32 bias.
    + [(_autocast, path) for path in range(len(PATHS)) if path not in (5, 6, 7)],
)
def test_forwards_run_with_and_without_a_context(
    mechanism: Mechanism, path: int, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Saved-tensor hooks, which the next graph of the same pattern lacks, and autocast."""
    pair = Pair(mechanism)
    for seed in range(2):
        pair.step(path)
        with context():
            backward = pair.forward(path, seed=seed)
        backward()()
        _assert_equal(pair.stages[1], pair.stages[0])
    pair.step(path)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parameter_is_replaced_between_microbatches(mechanism: Mechanism) -> None:
    pair = Pair(mechanism)
    pair.step(0)
    for stage in pair.stages:
        stage.first.weight = nn.Parameter(stage.first.weight.detach() * 2)
        stage.second.weight = nn.Parameter(stage.second.weight.detach().t())
        stage.raw.data = stage.raw.data.t()
    for path in range(len(PATHS)):
        pair.step(path)


def _pattern_of(stage: Branching, path: int, rows: int) -> object:
    x = _microbatch(path, rows, 0)
    return read_graph([stage(x)], [x], (), list(stage.parameters()))[1]


def test_pattern_depends_on_the_path_but_not_on_the_data() -> None:
    stage = Branching()
    patterns = [_pattern_of(stage, path, rows=3) for path in range(len(PATHS))]
    assert patterns == [_pattern_of(stage, path, rows=5) for path in range(len(PATHS))]
    # The order of three uses is not a matter of pattern, nor is the scale of a product.
    assert patterns[10] == patterns[11] == patterns[12]
    assert patterns[5] == patterns[6]
    different = [*patterns[:6], *patterns[8:11], patterns[14]]
    assert all(first != second for i, first in enumerate(different) for second in different[:i])


def test_pattern_tells_which_leaves_are_weights_and_inputs() -> None:
    stage, x = Branching(), _microbatch(0, 3, 0)
    out, weights = stage(x), list(stage.parameters())
    whole = read_graph([out], [x], (), weights)[1]
    assert whole != read_graph([out], [x], (), weights[:-1])[1]
    assert whole != read_graph([out], [x, stage.first.weight], (), weights)[1]
    assert whole != read_graph([out], [], (), weights)[1]
    assert whole != read_graph([out, out], [x], (), weights)[1]
    assert out.grad_fn is not None
    assert whole != read_graph([out], [x], [out.grad_fn], weights)[1]
    assert whole == read_graph([out], [x], [], weights)[1]


@pytest.mark.parametrize("joined", [(7, 8), (8, 7)])
def test_one_weight_that_cannot_wait_makes_all_that_join_it_urgent(joined: tuple[int, int]) -> None:
    """The last of three users joins two clusters, of which one has a user of unknown kind."""

    def node(kind: int, *edges: int) -> tuple[int, ...]:
        return kind + PER_EDGE * len(edges), *edges

    nodes = [
        node(OTHER, 1, 2, 3),
        node(OTHER, 4, 8),  # A multiplication by weight 1.
        node(PRODUCT, 4, 5),
        node(PRODUCT, 4, 6),
        (LEAF, INPUT),
        node(OTHER, 7, 9),
        node(OTHER, *joined),
        (LEAF, 0),
        (LEAF, 1),
        (LEAF, 2),
    ]
    found = harvest(Pattern((0,), tuple(chain.from_iterable(nodes)), ()))
    assert ((), {0, 1, 2}) == (found.clusters, set(found.urgent))


def test_second_microbatch_uses_the_plan_of_the_first() -> None:
    stage = Branching()
    harvest.cache_clear()
    for rows in (3, 4):
        x = _microbatch(0, rows, 0)
        harvest(read_graph([stage(x)], [x], (), list(stage.parameters()))[1])
    info = harvest.cache_info()
    assert (1, 1) == (info.hits, info.misses)
    assert info.maxsize is not None  # It is bounded.


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kept_plans_keep_no_stage_alive(mechanism: Mechanism) -> None:
    stage = Branching()
    run, x = mechanism(stage), _microbatch(0, 3, 0)
    run((x,), {}).backward_input(torch.ones(2, 3, WIDTH))[1]()
    gone = [weakref.ref(tensor) for tensor in (stage.first.weight, stage.raw, x)]
    del stage, run, x
    gc.collect()
    assert [None] * 3 == [ref() for ref in gone]
