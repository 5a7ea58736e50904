"""Random networks: functions and engine against plain autograd, every gradient.

The plain model runs its microbatches in the order in which the split one finishes them,
so hooks must see the same gradients in the same order.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from pieces import BATCH, TOKENS, WIDTH, PythonScaled
from strategies import Case, ParamHook, cases
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuzzing import examples
from penstock.backward import (
    SplitEngine,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.errors import BackwardError

Seen = dict[tuple[str, str], list[Tensor]]


@pytest.mark.fuzz
@examples(120, long=20_000)
@given(cases())
def test_gradients_equal_those_of_plain_autograd(case: Case) -> None:
    model = case.network.build()
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    plain = _Plain(models[0], case)
    if not plain.has_gradients:
        for runner in (_Functions(models[1], case), _Engine(models[2], case)):
            with pytest.raises(BackwardError, match="no stage output requires a gradient"):
                runner.run()
        return
    plain.run()
    for runner in (_Functions(models[1], case), _Engine(models[2], case)):
        runner.run()
        _compare(plain, runner, type(runner).__name__)


class _Batch:
    """The inputs of one microbatch and the gradients of its outputs, the same for each runner."""

    def __init__(self, case: Case, mb: int) -> None:
        random = torch.Generator().manual_seed(mb)
        shape = (BATCH, TOKENS, WIDTH)
        self.leaves: list[Tensor] = []
        self.inputs: list[Tensor] = []
        for kind in (case.x, case.y):
            leaf = torch.randn(shape, generator=random, dtype=torch.float64)
            leaf.requires_grad_(kind != "constant")
            self.leaves.append(leaf)
            self.inputs.append(leaf * 1 if kind == "computed" else leaf)
        self.ids = torch.randint(WIDTH, shape[:2], generator=random)
        self._random = random
        self._case = case

    def grads(self, outputs: Any) -> Any:
        """Gradients that mirror the outputs, None where the case says that nobody used one."""
        wanted = [output.has_grad for output in self._case.network.outputs]
        match self._case.network.container:
            case "tuple":
                return tuple(self._grad(o, w) for o, w in zip(outputs, wanted, strict=True))
            case "list":
                return [self._grad(o, w) for o, w in zip(outputs, wanted, strict=True)]
            case "dict":
                pairs = zip(outputs.items(), wanted, strict=True)
                return {key: self._grad(o, w) for (key, o), w in pairs}
            case "nested":
                first, rest = outputs[0], outputs[1]["rest"]
                rest_grads = [self._grad(o, w) for o, w in zip(rest, wanted[1:], strict=True)]
                return (self._grad(first, wanted[0]), {"rest": rest_grads})
            case "single":
                return self._grad(outputs, True)

    def _grad(self, output: Any, is_wanted: bool) -> Any:
        if isinstance(output, tuple):
            return tuple(self._grad(item, is_wanted) for item in output)
        if not isinstance(output, Tensor):
            return None
        grad = torch.randn(output.shape, generator=self._random, dtype=torch.float64)
        return grad if is_wanted else None


def _pairs(outputs: Any, grads: Any) -> list[tuple[Tensor, Tensor]]:
    is_leaf = lambda value: value is None  # noqa: E731
    flat = pytree.tree_leaves(outputs), pytree.tree_leaves(grads, is_leaf=is_leaf)
    pairs = zip(*flat, strict=True)
    return [(o, g) for o, g in pairs if isinstance(o, Tensor) and o.requires_grad and g is not None]


def _loss(outputs: Any, grads: Any) -> Tensor:
    """A loss whose gradients are the given ones."""
    total = torch.zeros((), dtype=torch.float64)
    for output, grad in _pairs(outputs, grads):
        total = total + (output * grad).sum()
    return total


class _Runner:
    """Runs the case's events on a model and keeps the gradients of all inputs."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model = model
        self.case = case
        self.input_grads: dict[int, Sequence[Tensor | None]] = {}
        self.leaf_grads: dict[int, Sequence[Tensor | None]] = {}
        self.seen: Seen = {}
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for hook in case.hooks:
            name, param = trainable[hook.param % len(trainable)]
            _register(hook, name, param, self.seen)

    def counts(self) -> list[int]:
        """How often each Python function ran its backward."""
        return [m.counter[0] for m in self.model.modules() if isinstance(m, PythonScaled)]


def _register(hook: ParamHook, name: str, param: Tensor, seen: Seen) -> None:
    log = seen.setdefault((name, hook.kind), [])

    def see(grad: Tensor) -> Tensor | None:
        log.append(grad.detach().clone())
        return grad * 2 if hook.kind == "double" else None

    if hook.kind == "post":
        param.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    else:
        param.register_hook(see)


class _Plain(_Runner):
    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__(model, case)
        batch = _Batch(case, 0)
        outputs = model(*batch.inputs, ids=batch.ids)
        if case.has_loss:
            self.has_gradients = bool(_pairs(outputs, batch.grads(outputs)))
        else:
            tensors = [o for o in pytree.tree_leaves(outputs) if isinstance(o, Tensor)]
            self.has_gradients = any(o.requires_grad for o in tensors)

    def run(self) -> None:
        for kind, mb in self.case.events:
            if kind not in "BW":
                continue
            batch = _Batch(self.case, mb)
            for x in batch.inputs:
                if not x.is_leaf:
                    x.retain_grad()
            outputs = self.model(*batch.inputs, ids=batch.ids)
            pairs = _pairs(outputs, batch.grads(outputs))
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))
            self.input_grads[mb] = [x.grad for x in batch.inputs]
            self.leaf_grads[mb] = [x.grad for x in batch.leaves]


class _Functions(_Runner):
    def run(self) -> None:
        forwards: dict[int, tuple[_Batch, Any]] = {}
        groups: dict[int, Any] = {}
        params = list(self.model.parameters())
        for kind, mb in self.case.events:
            if kind == "F":
                batch = _Batch(self.case, mb)
                forwards[mb] = batch, self.model(*batch.inputs, ids=batch.ids)
            elif kind == "W":
                stage_backward_weight(params, groups.pop(mb))
            else:
                batch, outputs = forwards.pop(mb)
                grads = batch.grads(outputs)
                if self.case.has_loss:
                    outputs, grads = _loss(outputs, grads), None
                if kind == "B":
                    self.input_grads[mb] = stage_backward(outputs, grads, batch.inputs)
                    continue
                self.input_grads[mb], groups[mb] = stage_backward_input(
                    outputs, grads, batch.inputs, params
                )
                self.leaf_grads[mb] = _upstream(batch, self.input_grads[mb])


class _Engine(_Runner):
    def run(self) -> None:
        engine = SplitEngine(self.model)
        forwards: dict[int, tuple[_Batch, Any]] = {}
        pending: dict[int, Any] = {}
        for kind, mb in self.case.events:
            if kind == "F":
                batch = _Batch(self.case, mb)
                forwards[mb] = batch, engine.forward(*batch.inputs, ids=batch.ids)
            elif kind == "W":
                pending.pop(mb).run()
            else:
                batch, forward = forwards.pop(mb)
                grads = batch.grads(forward.outputs)
                given: dict[str, Any] = {"output_grads": grads}
                if self.case.has_loss:
                    given = {"loss": _loss(forward.outputs, grads)}
                if kind == "B":
                    input_grads = forward.backward(**given)
                else:
                    input_grads, pending[mb] = forward.backward_input(**given)
                assert input_grads[2] is None
                self.input_grads[mb] = input_grads[:2]
                self.leaf_grads[mb] = _upstream(batch, input_grads)


def _upstream(batch: _Batch, input_grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of the leaves, carried on from those of the inputs, as a stage before would."""
    grads: list[Tensor | None] = []
    for leaf, x, grad in zip(batch.leaves, batch.inputs, input_grads, strict=False):
        if x is not leaf and grad is not None:
            (grad,) = torch.autograd.grad(x, leaf, grad)
        grads.append(grad)
    return grads


def _compare(plain: _Runner, split: _Runner, runner: str) -> None:
    for mb, grads in split.input_grads.items():
        for name, expected, actual in zip("xy", plain.input_grads[mb], grads, strict=True):
            _assert_same(expected, actual, f"{runner}: input {name} of microbatch {mb}")
    for mb, grads in split.leaf_grads.items():
        for name, expected, actual in zip("xy", plain.leaf_grads[mb], grads, strict=True):
            _assert_same(expected, actual, f"{runner}: leaf before {name} of microbatch {mb}")
    params = zip(plain.model.named_parameters(), split.model.parameters(), strict=True)
    for (name, reference), param in params:
        _assert_same(reference.grad, param.grad, f"{runner}: parameter {name}")
    assert plain.seen.keys() == split.seen.keys()
    for key, log in plain.seen.items():
        name = f"{runner}: hook {key}"
        assert len(log) == len(split.seen[key]), f"{name} ran {len(split.seen[key])} times"
        for expected, actual in zip(log, split.seen[key], strict=True):
            _assert_same(expected, actual, name)
    assert plain.counts() == split.counts(), f"{runner}: runs of Python functions"


def _assert_same(expected: Tensor | None, actual: Tensor | None, name: str) -> None:
    if expected is None or actual is None:
        assert expected is actual, f"{name}: {expected} != {actual}"
        return
    assert expected.layout == actual.layout, name
    expected, actual = expected.to_dense(), actual.to_dense()
    # W may come in another order than plain backwards, and so do the sums; float64 leaves
    # rounding far below this, and this is far below assert_close's default.
    scale = 1 + expected.abs().max().item()
    assert torch.allclose(expected, actual, rtol=1e-9, atol=1e-11 * scale, equal_nan=True), (
        f"{name}:\n{expected}\n{actual}"
    )
