"""Errors of the split backward: their type, and the text that tells what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mechanisms import MECHANISMS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.backward import (
    SplitEngine,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.errors import BackwardError, PipelineError

Mechanism = Callable[[nn.Module], Callable[..., Any]]
on_both = pytest.mark.parametrize("mechanism", MECHANISMS)


def _input() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Returns(nn.Module):
    """Returns its layer's output in a container."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.layer(x))


def test_backward_error_is_ours_and_a_runtime_error() -> None:
    assert issubclass(BackwardError, PipelineError)
    assert issubclass(BackwardError, RuntimeError)


# [1] Gradients that do not match the outputs.

GRAD = torch.ones(3, 4)
MISMATCHES: list[tuple[str, Callable[[Tensor], Any], Any, str]] = [
    (
        "shape",
        lambda y: y,
        torch.ones(4, 3),
        r"for output it holds a gradient of shape \(4, 3\) and torch.float32; "
        r"expected one of shape \(3, 4\) and torch.float32\. Give each output its gradient",
    ),
    (
        "a complex gradient of a real output",
        lambda y: y,
        GRAD.to(torch.complex64),
        r"for output it holds a gradient of shape \(3, 4\) and torch.complex64; expected one of "
        r"shape \(3, 4\) and torch.float32",
    ),
    ("a list for a tensor", lambda y: y, [GRAD], "for output it holds a list; expected a tensor"),
    ("a number", lambda y: y, 1.0, "for output it holds a float; expected a tensor or None"),
    (
        "too few",
        lambda y: (y, y * 2),
        (GRAD,),
        "for output it holds 1 gradients; expected 2 gradients",
    ),
    (
        "too many",
        lambda y: [y],
        [GRAD, GRAD],
        "for output it holds 2 gradients; expected 1 gradients",
    ),
    (
        "a tensor for a tuple",
        lambda y: (y, y * 2),
        GRAD,
        "for output it holds a Tensor; expected 2 gradients",
    ),
    (
        "shape in a list",
        lambda y: [y, y * 2],
        [GRAD, torch.ones(3)],
        r"for output\[1\] it holds a gradient of shape \(3,\)",
    ),
    (
        "a list for a dict",
        lambda y: {"a": y, "b": y * 2},
        [GRAD, GRAD],
        r"for output it holds a list; expected a dict with the keys \['a', 'b'\]",
    ),
    (
        "number in a dict",
        lambda y: {"a": y, "b": y * 2},
        {"a": GRAD},
        r"for output it holds 1 gradients; expected a dict with the keys \['a', 'b'\]",
    ),
    (
        "keys of a dict",
        lambda y: {"a": y, "b": y * 2},
        {"a": GRAD, "c": GRAD},
        r"for output it holds keys \['a', 'c'\]; expected a dict with the keys \['a', 'b'\]",
    ),
    (
        "nested",
        lambda y: (y, {"rest": [y * 2, y * 3]}),
        (GRAD, {"rest": [None, torch.ones(1)]}),
        r"for output\[1\]\['rest'\]\[1\] it holds a gradient of shape \(1,\)",
    ),
    (
        "number nested",
        lambda y: (y, {"rest": [y * 2, y * 3]}),
        (GRAD, {"rest": [GRAD]}),
        r"for output\[1\]\['rest'\] it holds 1 gradients; expected 2 gradients",
    ),
]


@pytest.mark.parametrize(
    ("pack", "grads", "text"), [m[1:] for m in MISMATCHES], ids=[m[0] for m in MISMATCHES]
)
def test_gradients_that_do_not_match_the_outputs_are_rejected(
    pack: Any, grads: Any, text: str
) -> None:
    model, x = Returns(pack), _input()
    backwards = [mechanism(model)((x,), {}).backward_input for mechanism in MECHANISMS]
    backwards.append(lambda grads: stage_backward(model(x), grads, (x,)))
    for backward in backwards:
        with pytest.raises(
            BackwardError, match="^output_grads does not match the stage output: " + text
        ):
            backward(grads)


@on_both
def test_rejected_gradients_leave_the_parameters_untouched(mechanism: Mechanism) -> None:
    model = Returns(lambda y: y)
    with pytest.raises(BackwardError):
        mechanism(model)((_input(),), {}).backward_input(torch.ones(1))
    assert all(param.grad is None for param in model.parameters())


def test_engine_pass_can_be_run_after_its_gradients_were_rejected() -> None:
    """A wrong gradient is found before anything ran, so the right one may follow."""
    model = nn.Linear(4, 4)
    forward = SplitEngine(model).forward(_input())
    with pytest.raises(BackwardError, match="output_grads does not match"):
        forward.backward_input(torch.ones(1))
    _, pending = forward.backward_input(GRAD)
    pending.run()
    assert model.weight.grad is not None


# [2] Outputs that lead nowhere.

NO_GRAD = r"^no stage output requires a gradient \(got .*\), so there is nothing to run backward"


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (torch.ones(3, 4), r"got output of shape \(3, 4\) and torch.float32"),
        ([torch.ones(1), {"a": torch.ones(2)}], r"output\[0\] of shape \(1,\).*output\[1\]\['a'\]"),
        (None, "got no tensor"),
        ([3, "text"], "got no tensor"),
    ],
)
def test_outputs_of_which_none_requires_a_gradient_are_rejected(outputs: Any, found: str) -> None:
    for text in (NO_GRAD, found, "Expected at least one output computed from an input"):
        with pytest.raises(BackwardError, match=text):
            stage_backward(outputs, None, ())
        with pytest.raises(BackwardError, match=text):
            stage_backward_input(outputs, None, [_input()], [])


def test_engine_rejects_outputs_of_which_none_requires_a_gradient() -> None:
    for model, grads in ((nn.Flatten(0), torch.ones(12)), (Returns(Tensor.detach), GRAD)):
        x = torch.randn(3, 4)
        with pytest.raises(BackwardError, match=NO_GRAD):
            SplitEngine(model).forward(x).backward_input(grads)


def test_engine_forward_without_gradients_cannot_be_run_backward() -> None:
    split = SplitEngine(_mlp())
    with torch.no_grad():
        forward = split.forward(_input())
    with pytest.raises(BackwardError, match=NO_GRAD):
        forward.backward_input(GRAD)


# [3] A graph that an earlier backward released.

RELEASED = (
    r"^the graph of the stage outputs \(of shape \(3, 4\) and torch.float32\) has been released by "
    r"an earlier backward\. Each backward needs its own forward"
)


def test_full_backward_twice_is_rejected() -> None:
    x = _input()
    outputs = _mlp()(x)
    stage_backward(outputs, GRAD, (x,))
    with pytest.raises(BackwardError, match=RELEASED):
        stage_backward(outputs, GRAD, (x,))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_input_half_after_a_full_backward_is_rejected(requires_grad: bool) -> None:
    model = _mlp()
    x = torch.randn(3, 4, requires_grad=requires_grad)
    outputs = model(x)
    outputs.backward(GRAD)

    def run_both_halves() -> None:
        _, groups = stage_backward_input(outputs, GRAD, [x], model.parameters())
        # Without a differentiable input the graph is only needed here.
        stage_backward_weight(model.parameters(), groups)

    with pytest.raises(BackwardError, match=RELEASED):
        run_both_halves()


BUILDS: list[Callable[[], nn.Module]] = [
    _mlp,
    lambda: nn.Linear(4, 4),
    lambda: nn.LayerNorm(4),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
]


@pytest.mark.parametrize("build", BUILDS, ids=["mlp", "linear", "norm", "linear and norm"])
def test_input_half_twice_is_rejected(build: Callable[[], nn.Module]) -> None:
    model = build()
    x = _input()
    outputs = model(x)
    stage_backward_input(outputs, GRAD, [x], model.parameters())
    with pytest.raises(BackwardError, match=RELEASED):
        stage_backward_input(outputs, GRAD, [x], model.parameters())


def test_full_backward_after_an_input_half_is_rejected() -> None:
    model = _mlp()
    x = _input()
    outputs = model(x)
    stage_backward_input(outputs, GRAD, [x], model.parameters())
    with pytest.raises(BackwardError, match=RELEASED):
        stage_backward(outputs, GRAD, [x])


def test_released_graph_error_has_autograds_own_as_its_cause() -> None:
    x = _input()
    outputs = _mlp()(x)
    stage_backward(outputs, GRAD, (x,))
    with pytest.raises(BackwardError) as caught:
        stage_backward(outputs, GRAD, (x,))
    assert type(caught.value.__cause__) is RuntimeError


# [4] The weight half.


def _halved(model: nn.Module) -> list[Any]:
    x = _input()
    _, groups = stage_backward_input(model(x), GRAD, [x], model.parameters())
    return groups


@pytest.mark.parametrize("build", BUILDS, ids=["mlp", "linear", "norm", "linear and norm"])
def test_weight_half_twice_is_rejected(build: Callable[[], nn.Module]) -> None:
    model = build()
    groups = _halved(model)
    stage_backward_weight(model.parameters(), groups)
    grads = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(
        BackwardError,
        match=r"^the weight backward of ParamGroup\(params of shapes .*; done\) has run already, "
        r"and what it needed is freed\. .* or pass retain_graph=True",
    ):
        stage_backward_weight(model.parameters(), groups)
    for before, param in zip(grads, model.parameters(), strict=True):
        assert torch.equal(before, param.grad)


@pytest.mark.parametrize("build", BUILDS, ids=["mlp", "linear", "norm", "linear and norm"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_weight_half_with_retain_graph_may_run_twice_and_adds_twice(
    build: Callable[[], nn.Module], requires_grad: bool
) -> None:
    model = build()
    x = torch.randn(3, 4, requires_grad=requires_grad)
    _, groups = stage_backward_input(model(x), GRAD, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups, retain_graph=True)
    once = [param.grad.clone() for param in model.parameters()]
    stage_backward_weight(model.parameters(), groups)
    for grad, param in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, grad * 2)
    with pytest.raises(BackwardError, match="has run already"):
        stage_backward_weight(model.parameters(), groups)


def test_engines_weight_half_twice_is_rejected() -> None:
    _, pending = SplitEngine(_mlp()).forward(_input()).backward_input(GRAD)
    pending.run()
    with pytest.raises(
        BackwardError,
        match=r"^this weight backward has run already\. Run each PendingWeights once",
    ):
        pending.run()


def test_groups_with_a_wrong_number_of_gradients_are_rejected() -> None:
    model = nn.Linear(4, 4)
    (group,) = _halved(model)
    for grads in ([], [(GRAD,), (GRAD,)]):
        group["grads"] = grads
        with pytest.raises(
            BackwardError,
            match=rf'^group\["grads"\] of ParamGroup\(.*; pending\) has {len(grads)} entries; '
            "expected 1, one tuple of gradients for each node",
        ):
            stage_backward_weight(model.parameters(), [group])
    assert model.weight.grad is None


def test_groups_with_a_gradient_of_a_wrong_shape_are_rejected() -> None:
    model = nn.Linear(4, 4)
    (group,) = _halved(model)
    group["grads"] = [(GRAD, torch.ones(2, 4))]
    with pytest.raises(
        BackwardError,
        match=r'^group\["grads"\]\[0\] of ParamGroup\(.*\) holds a gradient of shape \(2, 4\); '
        r"expected \(3, 4\), the shape of the gradient that arrived there",
    ):
        stage_backward_weight(model.parameters(), [group])
    assert model.weight.grad is None


def test_weights_of_another_module_are_rejected() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    groups = _halved(model)
    with pytest.raises(
        BackwardError,
        match=r"^param_groups holds a parameter of shape \(4,.*\) and torch.float32 that is not "
        r"among the weights\. .* pass the same module's parameters to both",
    ):
        stage_backward_weight(other.parameters(), groups)
    assert all(param.grad is None for param in [*model.parameters(), *other.parameters()])
    stage_backward_weight(model.parameters(), groups)
    assert model.weight.grad is not None


# [5] Tensors that were modified too early.

MODIFIED = (
    r"^an activation or gradient of shape .* that the weight backward needs was modified in place "
    r"after the input backward\. .* give each microbatch its own buffers"
)
PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4, bias=False), (3, 4)),
    "linear of three dimensions": (lambda: nn.Linear(4, 4, bias=False), (2, 3, 4)),
    "convolution": (lambda: nn.Conv1d(3, 3, 1, bias=False), (2, 3, 4)),
}
on_products = pytest.mark.parametrize(("build", "shape"), PRODUCTS.values(), ids=PRODUCTS.keys())


@on_both
@on_products
def test_activation_or_gradient_modified_between_the_halves_is_found(
    build: Any, shape: tuple[int, ...], mechanism: Mechanism
) -> None:
    model = build()
    split = mechanism(model)
    for name in ("activation", "gradient"):
        x, grad = torch.randn(shape, requires_grad=True), torch.ones(shape)
        _, weight_half = split((x,), {}).backward_input(grad)
        with torch.no_grad():
            (x if name == "activation" else grad).add_(1)
        with pytest.raises(BackwardError, match=MODIFIED):
            weight_half()
        assert model.weight.grad is None, name


@on_both
def test_gradient_of_a_bias_modified_between_the_halves_is_found(mechanism: Mechanism) -> None:
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    grad = GRAD.clone()
    _, weight_half = mechanism(model)((_input(),), {}).backward_input(grad)
    grad.add_(1)
    with pytest.raises(BackwardError, match=MODIFIED):
        weight_half()


def test_engine_finds_an_activation_modified_before_the_input_half() -> None:
    x = _input()
    forward = SplitEngine(nn.Linear(4, 4)).forward(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(
        BackwardError,
        match=r"^an activation or gradient of shape \(3, 4\) that the input backward needs was "
        "modified in place after the forward",
    ):
        forward.backward_input(GRAD)


# [6] Reentrant checkpoints.


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=True)
        return y


@on_both
def test_reentrant_checkpoint_is_refused(mechanism: Mechanism) -> None:
    run = mechanism(Reentrant())((_input(),), {})
    with pytest.raises(
        BackwardError,
        match=r"^the stage uses torch.utils.checkpoint with use_reentrant=True, whose backward "
        r"cannot be split\. Pass use_reentrant=False\.$",
    ):
        run.backward_input(GRAD)
