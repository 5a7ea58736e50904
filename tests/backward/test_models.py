"""On every kind of stage, the split backward gives what plain autograd gives.

Each stage is run by both mechanisms, each in an order of its own that changes from stage to stage.
Only `make fuzz` runs every stage by both in every order.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from backward.case import Case, tally_of
from backward.cases import CASES
from backward.cases_large import LARGE_CASES
from backward.cases_runs import Block, Checkpointed
from backward.mechanisms import MECHANISMS, AbstractPass, autograd, tensors_of
from fuzzing import IS_LONG
from penstock.backward import SplitEngine

# F forward, B full backward, I input half, W weight half; the number is the microbatch.
SCHEDULES = {
    "I then W": "F0 I0 W0",
    "10 microbatches accumulated": " ".join(f"F{i} I{i} W{i}" for i in range(10)),
    "4 in flight, W out of order": "F0 F1 F2 F3 I0 I1 I2 I3 W2 W0 W3 W1",
    "F, I and W interleaved, I out of order": "F0 I0 F1 F2 I2 W0 I1 F3 W1 I3 W3 W2",
    "full backward, and mixed with split ones": "F0 B0 F1 F2 I1 B2 W1",
}

# The sizes at which kernels block their sums: 256 rows and more.
LARGE_SCHEDULES = ("I then W", "10 microbatches accumulated", "4 in flight, W out of order")

Mechanism = Callable[[nn.Module], Callable[..., AbstractPass]]


def paired(cases: Sequence[Case], schedules: Sequence[str]) -> list[Any]:
    """Return each case by each mechanism, in one schedule; in `make fuzz` in all of them.

    The mechanisms advance through the schedules at different speeds, so all pairs come up.
    """
    chosen: list[tuple[Case, Mechanism, str]] = []
    for number, case in enumerate(cases):
        for stride, mechanism in enumerate(MECHANISMS):
            place = (number + stride * (number // len(schedules))) % len(schedules)
            found = schedules if IS_LONG else [schedules[place]]
            chosen += [(case, mechanism, schedule) for schedule in found]
    return [
        pytest.param(case, mechanism, schedule, id=f"{case.name}-{mechanism.__name__}-{schedule}")
        for case, mechanism, schedule in chosen
    ]


def alternating(cases: Sequence[Case]) -> list[Any]:
    """Return each case by one mechanism or the other; in `make fuzz` by both."""
    pairs = itertools.product(cases, MECHANISMS)
    if not IS_LONG:
        pairs = zip(cases, itertools.cycle(MECHANISMS), strict=False)
    return [pytest.param(case, each, id=f"{case.name}-{each.__name__}") for case, each in pairs]


class Run(NamedTuple):
    """What a run of a schedule left behind."""

    stage: nn.Module
    outputs: dict[str, list[Tensor]]
    given: dict[str, list[Tensor]]
    input_grads: dict[str, list[Tensor | None]]


def seed(number: int) -> None:
    """`torch.manual_seed` for the CPU alone, which is forty times as fast."""
    torch.default_generator.manual_seed(number)


def param_grads(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in stage.named_parameters()}


def copies(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def grads_for(outputs: Any, unused: frozenset[int]) -> Any:
    """Random gradients that mirror the outputs; None for what gets none."""
    numbers = iter(range(10**6))

    def mirror(value: Any) -> Any:
        if isinstance(value, Tensor):
            gets_one = next(numbers) not in unused and value.requires_grad
            return torch.randn_like(value).detach() if gets_one else None
        if isinstance(value, tuple | list):
            return [mirror(item) for item in value]
        if isinstance(value, dict):
            return {key: mirror(item) for key, item in value.items()}
        return None

    return mirror(outputs)


def run(case: Case, mechanism: Mechanism, schedule: str, *, with_loss: bool = False) -> Run:
    """Run a schedule of microbatches, each from a seed of its own."""
    seed(0)
    stage = case.build()
    forward = mechanism(stage)
    passes: dict[str, AbstractPass] = {}
    weight_halves: dict[str, Callable[[], object]] = {}
    done = Run(stage, {}, {}, {})

    def grads_of(mb: str) -> Any:
        seed(2000 + int(mb))
        grads = None if with_loss else grads_for(passes[mb].outputs, case.unused)
        done.given[mb] = tensors_of(grads)
        return grads

    for action, mb in schedule.split():
        match action:
            case "F":
                seed(1000 + int(mb))
                args, kwargs = case.make_inputs(), case.make_kwargs()
                with case.forward_context():
                    passes[mb] = forward(args, kwargs)
                done.outputs[mb] = [t.detach().clone() for t in tensors_of(passes[mb].outputs)]
            case "B":
                done.input_grads[mb] = list(passes[mb].backward(grads_of(mb)))
                del passes[mb]
            case "I":
                before = copies(param_grads(stage))
                grads, weight_halves[mb] = passes[mb].backward_input(grads_of(mb))
                done.input_grads[mb] = list(grads)
                del passes[mb]
                if mechanism is not autograd:
                    assert_same(before, param_grads(stage))
            case "W":
                weight_halves.pop(mb)()
    return done


@cache
def plain_run(case: Case, schedule: str, *, with_loss: bool = False) -> Run:
    """The run that all mechanisms are compared with: autograd's backwards, in the order of W.

    Sums depend on their order, so gradients that are added in the same order are equal to the
    last bit.
    """
    in_order_of_w = schedule.replace("W", "B").split()
    whole = " ".join(action for action in in_order_of_w if action[0] != "I")
    return run(case, autograd, whole, with_loss=with_loss)


@cache
def plain_buffers(case: Case, schedule: str, *, with_loss: bool = False) -> dict[str, Tensor]:
    """The running statistics after plain autograd, whose recomputations run in the order of I."""
    done = run(case, autograd, schedule, with_loss=with_loss)
    return dict(done.stage.named_buffers())


def assert_same(expected: Any, actual: Any) -> None:
    """Equal to the last bit, None for None; a sparse gradient's rows may come in any order."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key in expected:
            try:
                assert_same(expected[key], actual[key])
            except AssertionError as error:
                error.add_note(f"in {key!r}")
                raise
    elif isinstance(expected, list):
        assert_same(dict(enumerate(expected)), dict(enumerate(actual)))
    elif expected is None or actual is None:
        assert expected is actual, f"expected {expected}, got {actual}"
    else:
        assert expected.layout is actual.layout
        assert expected.dtype is actual.dtype
        if expected.is_sparse:
            expected, actual = expected.coalesce(), actual.coalesce()
        elif torch.equal(expected, actual):  # which is faster to find out
            return
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_equals_autograd(
    case: Case, mechanism: Mechanism, schedule: str, *, with_loss: bool = False
) -> None:
    expected = plain_run(case, schedule, with_loss=with_loss)
    found = [*param_grads(expected.stage).values(), *expected.input_grads["0"]]
    assert any(grad is not None for grad in found), "there is no gradient to compare"
    actual = run(case, mechanism, schedule, with_loss=with_loss)
    assert_same(expected.outputs, actual.outputs)
    # What the caller gave or got is still as it was: no gradient is added into it.
    assert_same(expected.given, actual.given)
    assert_same(expected.input_grads, actual.input_grads)
    assert_same(param_grads(expected.stage), param_grads(actual.stage))
    if buffers := dict(actual.stage.named_buffers()):
        assert_same(plain_buffers(case, schedule, with_loss=with_loss), buffers)
    # A Python Function's backward, and a checkpoint's recomputation, run as often as in
    # plain autograd: once in I and W together.
    assert tally_of(expected.stage) == tally_of(actual.stage)


@pytest.mark.fuzz
@pytest.mark.parametrize(("case", "mechanism", "schedule"), paired(CASES, [*SCHEDULES]))
def test_gradients_equal_plain_autograd(case: Case, mechanism: Mechanism, schedule: str) -> None:
    assert_equals_autograd(case, mechanism, SCHEDULES[schedule])


@pytest.mark.fuzz
@pytest.mark.parametrize(("case", "mechanism", "schedule"), paired(LARGE_CASES, LARGE_SCHEDULES))
def test_gradients_of_long_sums_equal_plain_autograd(
    case: Case, mechanism: Mechanism, schedule: str
) -> None:
    """A product that was fused with the addition to `.grad` once rounded differently here."""
    assert_equals_autograd(case, mechanism, SCHEDULES[schedule])


@pytest.mark.fuzz
@pytest.mark.parametrize(("case", "mechanism"), alternating(CASES))
def test_gradients_of_a_loss_equal_plain_autograd(case: Case, mechanism: Mechanism) -> None:
    assert_equals_autograd(case, mechanism, "F0 I0 W0 F1 B1", with_loss=True)


def test_case_names_are_unique() -> None:
    cases = [*CASES, *LARGE_CASES]
    assert len(cases) == len({case.name for case in cases})


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_checkpointed_blocks_are_recomputed_once_in_both_halves_together(
    mechanism: Mechanism,
) -> None:
    stage = nn.Sequential(*(Checkpointed(Block(8)) for _ in range(4)))
    one = mechanism(stage)((torch.randn(2, 5, 8, requires_grad=True),), {})
    forwards = 4
    assert {"forward": forwards} == tally_of(stage)
    _, weight_half = one.backward_input(torch.randn(2, 5, 8))
    assert {"forward": forwards + 4} == tally_of(stage)
    weight_half()
    assert {"forward": forwards + 4} == tally_of(stage)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_gradients_are_right_for_a_loss_that_uses_parameters_itself(mechanism: Mechanism) -> None:
    expected, actual = nn.Linear(4, 3), nn.Linear(4, 3)
    actual.load_state_dict(expected.state_dict())
    forward = mechanism(actual)
    for number in range(3):
        x, ref_x = (torch.full((2, 4), number + 0.5, requires_grad=True) for _ in range(2))
        (expected(ref_x).sum() + expected.weight.square().sum()).backward()
        one = forward((x,), {})
        loss = one.outputs.sum() + actual.weight.square().sum()
        (x_grad,), weight_half = one.backward_input_of(loss)
        weight_half()
        assert torch.equal(ref_x.grad, x_grad)
        assert torch.equal(expected.weight.grad, actual.weight.grad)
        assert torch.equal(expected.bias.grad, actual.bias.grad)


def test_engine_refuses_an_input_that_the_module_refuses() -> None:
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(x)
    with pytest.raises(RuntimeError, match="same dtype"):
        SplitEngine(layer).forward(x)


class SplitNode(torch.autograd.Function):
    """A node whose value is a stage's output, and whose backward is the split one.

    The stage runs anew in each backward, since gradcheck runs several from one forward.
    """

    @staticmethod
    def forward(ctx: Any, mechanism: Mechanism, stage: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.mechanism, ctx.stage, ctx.x = mechanism, stage, x.detach().clone()
        return stage(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        params = list(ctx.stage.parameters())
        for param in params:
            param.grad = None
        with torch.enable_grad():
            one = ctx.mechanism(ctx.stage)((ctx.x.clone().requires_grad_(),), {})
        (x_grad,), weight_half = one.backward_input(grad)
        weight_half()
        return None, None, x_grad, *(param.grad for param in params)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3, 3)),
        (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), (2, 2, 4)),
        (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 1)), (2, 2, 4)),
        (lambda: Checkpointed(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))), (2, 3)),
    ],
    ids=["MLP", "linear on 3-D input", "conv1d", "checkpointed MLP"],
)
def test_gradcheck_passes_in_float64(
    make: Callable[[], nn.Module], shape: tuple[int, ...], mechanism: Mechanism
) -> None:
    stage = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *inputs: SplitNode.apply(mechanism, stage, *inputs), (x, *stage.parameters())
    )
