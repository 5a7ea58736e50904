"""Hooks run in the split backward as they do in plain autograd; those of weights in W."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mechanisms import MECHANISMS
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.backward import SplitEngine

Mechanism = Callable[[nn.Module], Callable[..., Any]]
on_both = pytest.mark.parametrize("mechanism", MECHANISMS)
NUM_MICROBATCHES = 3


class Twice(nn.Module):
    """One weight used by two layers, and once more past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x)))
        return F.linear(x, self.first.weight.t())


class RawProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight * self.scale


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))


def _parametrised() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.GELU(), weight_norm(nn.Linear(4, 4)))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.GELU(), nn.Conv1d(3, 3, 1, bias=False))


MODELS = [_mlp, Twice, _parametrised, RawProducts, Checkpointed, _convolution]
on_models = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__.strip("_"))


def _batches() -> list[tuple[Tensor, Tensor]]:
    shape = (2, 3, 4)
    return [
        (torch.randn(shape).double().requires_grad_(), torch.randn(shape).double())
        for _ in range(NUM_MICROBATCHES)
    ]


def _assert_close(expected: list[Tensor], actual: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def _grads(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


@on_both
@on_models
def test_tensor_hook_sees_the_whole_gradient_of_each_weight_half_once_and_may_replace_it(
    build: Any, mechanism: Mechanism
) -> None:
    model = build().double()
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    expected: dict[str, list[Tensor]] = {name: [] for name in names}
    actual: dict[str, list[Tensor]] = {name: [] for name in names}

    def see_and_clamp(grad: Tensor, log: list[Tensor]) -> Tensor:
        log.append(grad.clone())
        return grad.clamp(-0.1, 0.1)

    for module, logs in ((plain, expected), (model, actual)):
        for name, param in module.named_parameters():
            param.register_hook(partial(see_and_clamp, log=logs[name]))
    batches = _batches()
    split = mechanism(model)
    pending = []
    for x, grad in batches:
        _, weight_half = split((x,), {}).backward_input(grad)
        pending.append(weight_half)
        assert all(not log for log in actual.values()), "a hook of a weight ran in I"
        plain(x.detach()).backward(grad)
    for done, weight_half in enumerate(pending, 1):
        weight_half()
        assert {name: done for name in names} == {name: len(actual[name]) for name in names}
    for name in names:
        _assert_close(expected[name], actual[name])
    _assert_close(_grads(plain), _grads(model))


@on_both
@on_models
def test_post_accumulate_hook_runs_once_per_weight_half_with_the_gradient_in_place(
    build: Any, mechanism: Mechanism
) -> None:
    model = build().double()
    plain = copy.deepcopy(model)
    expected: list[list[Tensor]] = []
    actual: list[list[Tensor]] = []
    for module, logs in ((plain, expected), (model, actual)):
        for param in module.parameters():
            logs.append([])
            param.register_post_accumulate_grad_hook(
                lambda param, log=logs[-1]: log.append(param.grad.clone())
            )
    split = mechanism(model)
    for done, (x, grad) in enumerate(_batches(), 1):
        _, weight_half = split((x,), {}).backward_input(grad)
        assert all(len(log) == done - 1 for log in actual), "a hook of a weight ran in I"
        weight_half()
        plain(x.detach()).backward(grad)
        assert all(len(log) == done for log in actual)
    for wanted, seen in zip(expected, actual, strict=True):
        _assert_close(wanted, seen)


@on_both
def test_post_accumulate_hook_may_step_and_drop_the_gradient(mechanism: Mechanism) -> None:
    model = _mlp().double()
    plain = copy.deepcopy(model)

    def step(param: Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(0.1 * param.grad)
        param.grad = None

    for module in (plain, model):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(step)
    split = mechanism(model)
    for x, grad in _batches():
        _, weight_half = split((x,), {}).backward_input(grad)
        weight_half()
        plain(x.detach()).backward(grad)
    _assert_close(list(plain.parameters()), list(model.parameters()))
    assert all(param.grad is None for param in model.parameters())


@on_both
def test_tensor_hook_runs_before_post_accumulate_hook(mechanism: Mechanism) -> None:
    model = _mlp().double()
    events: list[str] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: events.append("post"))
        param.register_hook(lambda _: events.append("tensor"))
    x, grad = _batches()[0]
    _, weight_half = mechanism(model)((x,), {}).backward_input(grad)
    weight_half()
    assert ["tensor", "post"] * len(list(model.parameters())) == events


@on_both
@on_models
def test_weight_half_runs_the_hooks_that_are_there_when_it_runs(
    build: Any, mechanism: Mechanism
) -> None:
    """The input half leaves them as they are; then all are removed, and others get their first."""
    model = build().double()
    split = mechanism(model)
    names = [name for name, _ in model.named_parameters()]
    seen: list[str] = []
    for first in (0, 1):
        hooked = {name: model.get_parameter(name) for name in names[first::2]}
        others = {name: model.get_parameter(name) for name in names[1 - first :: 2]}
        handles = []
        for name, param in hooked.items():
            handles.append(param.register_hook(lambda _, name=name: seen.append(name)))
            handles.append(param.register_post_accumulate_grad_hook(lambda _: seen.append("post")))
        before = [(param._backward_hooks, dict(param._backward_hooks)) for param in hooked.values()]
        x, grad = _batches()[0]
        _, weight_half = split((x,), {}).backward_input(grad)
        for param, (hooks, entries) in zip(hooked.values(), before, strict=True):
            assert hooks is param._backward_hooks
            assert entries == dict(hooks)
        for handle in handles:
            handle.remove()
        handles = [
            param.register_hook(lambda _, name=name: seen.append(name))
            for name, param in others.items()
        ]
        weight_half()
        assert sorted(others) == sorted(seen)
        assert all(not param._backward_hooks for param in hooked.values())
        seen.clear()
        for handle in handles:
            handle.remove()


@on_both
@pytest.mark.parametrize("build", [_mlp, RawProducts, Checkpointed])
def test_input_hooks_run_in_the_input_half_and_may_replace_the_gradient(
    build: Any, mechanism: Mechanism
) -> None:
    model = build().double()
    plain = copy.deepcopy(model)
    x, grad = _batches()[0]
    reference = x.detach().requires_grad_()
    reference.register_hook(lambda grad: grad * 3)
    plain(reference).backward(grad)
    seen: list[Tensor] = []

    def triple(grad: Tensor) -> Tensor:
        seen.append(grad)
        return grad * 3

    x.register_hook(triple)
    (dx,), weight_half = mechanism(model)((x,), {}).backward_input(grad)
    assert 1 == len(seen)
    _assert_close([reference.grad], [dx])
    weight_half()
    assert 1 == len(seen)
    _assert_close(_grads(plain), _grads(model))


class HookedInside(nn.Module):
    """Hooks on a linear layer's own output, on a view of it and on a norm's output."""

    def __init__(self, seen: list[str], *, is_flat: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.is_flat = is_flat
        self.seen = seen

    def _hook(self, x: Tensor, name: str, factor: float) -> Tensor:
        def scale(grad: Tensor) -> Tensor:
            self.seen.append(name)
            return grad * factor

        x.register_hook(scale)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.is_flat:
            x = x.flatten(0, 1)
        x = self._hook(self.first(x), "first", 2)
        x = self._hook(F.gelu(x), "gelu", 3)
        x = self._hook(self.norm(x), "norm", 5)
        x = self._hook(x @ self.weight, "product", 7)
        x = self._hook(self.last(x), "last", 0.5)
        return x.view(2, 3, 4)


@on_both
@pytest.mark.parametrize("is_flat", [True, False])
def test_hooks_on_intermediates_run_once_in_the_input_half_and_reach_the_weights(
    is_flat: bool, mechanism: Mechanism
) -> None:
    seen: list[str] = []
    plain_seen: list[str] = []
    model = HookedInside(seen, is_flat=is_flat).double()
    plain = HookedInside(plain_seen, is_flat=is_flat).double()
    plain.load_state_dict(model.state_dict())
    x, grad = _batches()[0]
    reference = x.detach().requires_grad_()
    plain(reference).backward(grad)
    (dx,), weight_half = mechanism(model)((x,), {}).backward_input(grad)
    assert plain_seen == seen
    weight_half()
    assert plain_seen == seen
    _assert_close([reference.grad], [dx])
    _assert_close(_grads(plain), _grads(model))


@on_both
def test_hooks_on_nodes_act_as_in_plain_autograd(mechanism: Mechanism) -> None:
    """A node's pre-hook changes what the node itself receives: its weight's gradient too."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for y in (x := self.linear(x.flatten(0, 1)), x := torch.mm(x, self.weight)):
                assert y.grad_fn is not None
                y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
            return x.view(2, 3, 4)

    model = Doubling().double()
    plain = copy.deepcopy(model)
    x, grad = _batches()[0]
    reference = x.detach().requires_grad_()
    plain(reference).backward(grad)
    (dx,), weight_half = mechanism(model)((x,), {}).backward_input(grad)
    weight_half()
    _assert_close([reference.grad], [dx])
    _assert_close(_grads(plain), _grads(model))


@on_both
@pytest.mark.parametrize("build", [_mlp, Checkpointed], ids=["mlp", "checkpointed"])
def test_module_hooks_act_as_in_plain_autograd(build: Any, mechanism: Mechanism) -> None:
    model = build().double()
    plain = copy.deepcopy(model)
    logs: list[list[tuple[str, str]]] = [[], []]
    for module, log in zip((plain, model), logs, strict=True):
        for name, child in module.named_modules():
            child.register_forward_pre_hook(lambda m, a, n=name, g=log: g.append(("F<", n)))
            child.register_forward_hook(lambda m, a, o, n=name, g=log: g.append(("F>", n)))
            child.register_full_backward_pre_hook(
                lambda m, go, n=name, g=log: g.append(("B<", n)) or (go[0] * 2,)
            )
            child.register_full_backward_hook(
                lambda m, gi, go, n=name, g=log: g.append(("B>", n)) or (gi[0] * 0.75,)
            )
    x, grad = _batches()[0]
    reference = x.detach().requires_grad_()
    plain(reference).backward(grad)
    (dx,), weight_half = mechanism(model)((x,), {}).backward_input(grad)
    assert sorted(logs[0]) == sorted(logs[1])
    weight_half()
    assert sorted(logs[0]) == sorted(logs[1])
    _assert_close([reference.grad], [dx])
    _assert_close(_grads(plain), _grads(model))


def test_engine_runs_hooks_that_someone_put_on_accumulators() -> None:
    model = _mlp().double()
    plain = copy.deepcopy(model)
    accumulators = []
    seen: list[int] = []
    for number, param in enumerate(model.parameters()):
        accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, number=number: seen.append(number))
        accumulators.append(accumulator)
    engine = SplitEngine(model)
    for done, (x, grad) in enumerate(_batches(), 1):
        _, pending = engine.forward(x).backward_input(grad)
        assert (done - 1) * len(accumulators) == len(seen)
        pending.run()
        assert sorted([*range(len(accumulators))] * done) == sorted(seen)
        plain(x.detach()).backward(grad)
    _assert_close(_grads(plain), _grads(model))


@on_both
def test_frozen_parameter_with_hooks_from_earlier_gets_nothing(mechanism: Mechanism) -> None:
    model = _mlp().double()
    seen: list[Tensor] = []
    frozen = next(model.parameters())
    frozen.register_hook(lambda grad: seen.append(grad))
    frozen.requires_grad_(False)
    x, grad = _batches()[0]
    _, weight_half = mechanism(model)((x,), {}).backward_input(grad)
    weight_half()
    assert [] == seen
    assert frozen.grad is None
