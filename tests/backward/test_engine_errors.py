"""Errors of the engine, and exceptions of the user's own that pass through a split backward."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mechanisms import MECHANISMS, engine, functions
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.backward import SplitEngine
from penstock.errors import AssignmentError, BackwardError

Mechanism = Callable[[nn.Module], Callable[..., Any]]
on_both = pytest.mark.parametrize("mechanism", MECHANISMS)
GRAD = torch.ones(3, 4)


def _input() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def test_engine_takes_gradients_or_a_loss_but_not_neither() -> None:
    forward = SplitEngine(_mlp()).forward(_input())
    with pytest.raises(
        BackwardError, match=r"^got neither output_grads nor a loss; expected one of them"
    ):
        forward.backward_input()


def test_engine_takes_gradients_or_a_loss_but_not_both() -> None:
    forward = SplitEngine(_mlp()).forward(_input())
    with pytest.raises(
        BackwardError, match=r"^got both output_grads and a loss; expected one of them"
    ):
        forward.backward_input(GRAD, loss=forward.outputs.sum())


@pytest.mark.parametrize("first", ["backward", "backward_input"])
@pytest.mark.parametrize("second", ["backward", "backward_input"])
def test_engines_backward_twice_is_rejected(first: str, second: str) -> None:
    forward = SplitEngine(_mlp()).forward(_input())
    getattr(forward, first)(GRAD)
    with pytest.raises(
        BackwardError,
        match=r"^the backward of this forward pass has run already, and its graph is released\. "
        r"Run the engine's forward again\.$",
    ):
        getattr(forward, second)(GRAD)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("build", [_mlp, Checkpointed])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_backward_directly_on_the_engines_outputs_is_refused(
    build: Callable[[], nn.Module], requires_grad: bool
) -> None:
    model = build()
    forward = SplitEngine(model).forward(torch.randn(3, 4, requires_grad=requires_grad))
    for run in (
        lambda: forward.outputs.backward(GRAD),
        lambda: F.gelu(forward.outputs).sum().backward(),
    ):
        with pytest.raises(
            BackwardError,
            match=r"^a backward reached the graph of a SplitEngine's forward, which does not "
            r"contain the weights, .* Call its backward_input\(\) or backward\(\)",
        ):
            run()
    assert all(param.grad is None for param in model.parameters())


# Exceptions of the user's own.


class Mistake(RuntimeError):
    """What a user's function raises; of the type that autograd's own errors have."""


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: list[bool]) -> Tensor:
        ctx.fails = fails
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fails[0]:
            raise Mistake("on purpose")
        return grads[0], None


class Fragile(nn.Module):
    """Fails in its forward or its backward, in the middle of layers, when told to."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4)
        self.is_checkpointed = is_checkpointed
        self.fails_forward = False
        self.fails_backward = [False]

    def _run(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.fails_forward:
            raise Mistake("on purpose")
        y: Tensor = self.last(Failing.apply(x, self.fails_backward))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_checkpointed:
            return self._run(x)
        y: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return y


def _fail(model: Fragile, split: Any, where: str) -> None:
    """Let one microbatch fail; the exception must keep its type and text."""
    if where == "forward":
        model.fails_forward = True
        with pytest.raises(Mistake, match=r"^on purpose$"):
            split((_input(),), {})
        model.fails_forward = False
        return
    run = split((_input(),), {})
    if where == "backward":
        model.fails_backward[0] = True
    else:
        model.fails_forward = True
    with pytest.raises(Mistake, match=r"^on purpose$"):
        run.backward_input(GRAD)
    model.fails_backward[0] = model.fails_forward = False


FAILURES = [
    ("forward", False),
    ("forward", True),
    ("backward", False),
    ("backward", True),
    ("recomputation", True),
]


@on_both
@pytest.mark.parametrize(("where", "is_checkpointed"), FAILURES)
def test_exception_of_the_users_own_keeps_its_type_and_the_next_microbatch_runs(
    where: str, is_checkpointed: bool, mechanism: Mechanism
) -> None:
    model = Fragile(is_checkpointed=is_checkpointed)
    seen: list[Tensor] = []
    handles = [param.register_hook(lambda grad: seen.append(grad)) for param in model.parameters()]
    hooks = [param._backward_hooks for param in model.parameters()]
    split = mechanism(model)
    _fail(model, split, where)
    assert [] == seen
    assert all(param.grad is None for param in model.parameters())
    for old, param in zip(hooks, model.parameters(), strict=True):
        assert old is param._backward_hooks
    assert all("forward" not in module.__dict__ for module in model.modules())

    x = _input()
    reference = x.detach().requires_grad_()
    expected = torch.autograd.grad(model(reference), [reference, *model.parameters()], GRAD)
    seen.clear()
    (dx,), weight_half = split((x,), {}).backward_input(GRAD)
    weight_half()
    assert len(handles) == len(seen)
    actual = [dx, *(param.grad for param in model.parameters())]
    torch.testing.assert_close(actual, list(expected))


@pytest.mark.parametrize(("where", "is_checkpointed"), FAILURES)
def test_engine_is_closed_after_an_exception(where: str, is_checkpointed: bool) -> None:
    """Its layers run as they did: what runs past the engine gets its gradients at once."""
    model = Fragile(is_checkpointed=is_checkpointed)
    split = engine(model)
    _fail(model, split, where)
    model(_input()).backward(GRAD)
    assert all(param.grad is not None for param in model.parameters())
    run = split((_input(),), {})
    with pytest.raises(BackwardError, match="a backward reached the graph of a SplitEngine"):
        run.outputs.backward(GRAD)


def test_exception_in_a_weights_hook_keeps_its_type() -> None:
    for mechanism in (functions, engine):
        model = _mlp()

        def fail(grad: Tensor) -> None:
            raise Mistake("on purpose")

        handle = next(model.parameters()).register_hook(fail)
        split = mechanism(model)
        _, weight_half = split((_input(),), {}).backward_input(GRAD)
        with pytest.raises(Mistake, match=r"^on purpose$"):
            weight_half()
        handle.remove()
        model.zero_grad()
        split((_input(),), {}).backward_input(GRAD)[1]()
        assert all(param.grad is not None for param in model.parameters())


def test_engine_is_for_one_module() -> None:
    engine = SplitEngine(nn.Linear(2, 2))
    message = "module of a SplitEngine cannot be changed: .* Make a new SplitEngine"
    with pytest.raises(AssignmentError, match=message):
        engine.module = nn.Linear(2, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_of_an_engine_works_on_its_own_module(copied: Any) -> None:
    engine = SplitEngine(nn.Linear(2, 2))
    x = torch.randn(3, 2, requires_grad=True)
    engine.forward(x).backward(torch.ones(3, 2))
    twin = copied(engine)
    twin.module.zero_grad()
    twin.forward(x).backward(torch.ones(3, 2))
    assert twin.module is not engine.module
    assert torch.equal(engine.module.weight.grad, twin.module.weight.grad)
