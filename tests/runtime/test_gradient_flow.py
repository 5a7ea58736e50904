"""Where gradients go and where they do not: frozen, passed on, tied, outside of the pipeline."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuzzing import rotated
from local_steps import (
    FOUR_STAGES,
    NUM_MICROBATCHES,
    NUM_STAGES,
    WIDTH,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
    step_unsplit,
    zero_grad,
)
from penstock import Pipeline, Replicate, Schedule, TensorChunkSpec, schedules
from penstock.errors import StageError
from penstock.ir import Backward
from penstock.runtime.outside_graphs import OutsideGraphs
from stage_training import assert_close, assert_same_grads
from staged_models import Batch, run_unsplit
from tensor_counts import live_tensors

every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)


def check(modules: list[nn.Module], schedule: Schedule, batch: Batch | None = None) -> None:
    """Two steps: the first learns the forms of the messages, the second relies on them."""
    batch = batch or mlp_batch()
    expected = step_unsplit(modules, batch)
    for _ in range(2):
        assert_same(expected, step_locally(modules, schedule, batch))


class Call(nn.Module):
    """A function of its input and a layer, as a stage."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


def between(give: Any, take: Any, place: int) -> list[nn.Module]:
    """Four stages; one gives what `give` makes, and the next one takes it."""
    modules = mlp()
    modules[place : place + 2] = [Call(give), Call(take)]
    return modules


@rotated(frozen=[(0,), (1,), (3,), (0, 1), (1, 2), (0, 1, 2), (0, 3)], schedule=FOUR_STAGES)
def test_frozen_stages_have_no_gradient_and_others_have_theirs(
    frozen: Iterable[int], schedule: Schedule
) -> None:
    modules = mlp()
    for index in frozen:
        modules[index].requires_grad_(False)
    check(modules, schedule)


@every_schedule
def test_partly_frozen_stages(schedule: Schedule) -> None:
    modules = mlp()
    for module in modules:
        module.up.requires_grad_(False)
        module.scale.requires_grad_(False)
    check(modules, schedule)


@every_schedule
def test_step_of_a_wholly_frozen_model_is_refused(schedule: Schedule) -> None:
    modules = mlp()
    for module in modules:
        module.requires_grad_(False)
    with pytest.raises(StageError, match="none of the losses of all 4 microbatches needs a grad"):
        check(modules, schedule)


@rotated(place=range(3), schedule=FOUR_STAGES)
def test_stages_before_an_output_that_needs_no_gradient_get_none(
    place: int, schedule: Schedule
) -> None:
    modules = mlp()
    modules[place] = Call(lambda layer, x: layer(x).detach())
    check(modules, schedule)


@rotated(
    places=[(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 3)],
    schedule=FOUR_STAGES,
)
def test_stage_passes_its_input_through(places: Iterable[int], schedule: Schedule) -> None:
    modules = mlp()
    for place in places:
        modules[place] = nn.Identity()
    check(modules, schedule)


@rotated(
    num_cases=14,
    kind=["twice", "view", "transposed", "expanded", "list", "dict", "one"],
    place=range(3),
    schedule=FOUR_STAGES,
)
def test_what_stages_pass_on(kind: str, place: int, schedule: Schedule) -> None:
    """Outputs that are one tensor twice, or views, or in containers."""
    give, take = {
        "twice": (lambda f, x: (y := f(x), y), lambda f, a, b: f(a) + b.sin()),
        "view": (lambda f, x: (y := f(x), y[:, :2]), lambda f, a, b: f(a) + b.sum(1, True)),
        "transposed": (lambda f, x: f(x).t(), lambda f, x: f(x.t())),
        "expanded": (lambda f, x: f(x).sum(1, True).expand(-1, WIDTH), lambda f, x: f(x * x)),
        "list": (lambda f, x: [f(x), x], lambda f, a, b: f(a) + b),
        "dict": (lambda f, x: {"a": f(x), "b": [x, 3]}, lambda f, d: f(d["a"]) * d["b"][1]),
        "one": (lambda f, x: (f(x),), lambda f, x: f(x)),
    }[kind]
    check(between(give, take, place), schedule)


@rotated(place=range(3), schedule=FOUR_STAGES)
def test_values_that_are_no_tensors_and_tensors_without_dims_are_passed_on(
    place: int, schedule: Schedule
) -> None:
    def give(layer: nn.Module, x: Tensor) -> Any:
        return layer(x), None, 2, {"mode": "double", "scale": layer.bias.sum()}

    def take(layer: nn.Module, x: Tensor, nothing: None, times: int, how: Any) -> Tensor:
        assert nothing is None
        assert how["mode"] == "double"
        return layer(x) * times * how["scale"]

    check(between(give, take, place), schedule)


@rotated(
    dtype=[torch.bool, torch.int32, torch.float32, torch.complex128],
    schedule=FOUR_STAGES,
)
def test_tensors_of_other_types_are_passed_on(dtype: torch.dtype, schedule: Schedule) -> None:
    def give(layer: nn.Module, x: Tensor) -> Any:
        y = layer(x)
        return y, (y > 0) if dtype is torch.bool else (2 * y).to(dtype)

    def take(layer: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        return layer(x) + (other.abs() if dtype.is_complex else other).double()

    check(between(give, take, 1), schedule)


@rotated(place=range(3), schedule=FOUR_STAGES)
def test_gradient_that_is_passed_on_is_not_changed_by_adding_to_it(
    place: int, schedule: Schedule
) -> None:
    """The gradient of a sum is one tensor for the input and the parameter alike; if the parameter
    kept it and later microbatches were added to it, whoever takes it late would see them.
    """

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(randn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            # A microbatch has the rows of the parameter; the batch has them several times.
            return x + (self.shift if len(x) == 2 else self.shift.repeat(len(x) // 2, 1))

    modules = mlp()
    modules[place] = Shift()
    modules[place + 1] = Shift()
    check(modules, schedule)


@every_schedule
def test_parameter_that_only_some_microbatches_use(schedule: Schedule) -> None:
    class Sometimes(nn.Module):
        """Rows are independent, so that the unsplit model decides as the microbatches do."""

        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(WIDTH, WIDTH).double()
            self.positive = nn.Linear(WIDTH, WIDTH).double()
            self.never = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[:, 0] > 0
            y: Tensor = self.always(x)
            if chosen.any():
                y = y + chosen[:, None] * self.positive(x)
            return y

    modules: list[nn.Module] = [Sometimes() for _ in range(NUM_STAGES)]
    batch = mlp_batch()
    batch.args[0][:, 0] = torch.tensor([1.0, 1, -1, -1, -1, 1, -1, -1])
    check(modules, schedule, batch)


@every_schedule
def test_weights_tied_within_a_stage(schedule: Schedule) -> None:
    modules: list[nn.Module] = []
    for _ in range(NUM_STAGES):
        tied = nn.Linear(WIDTH, WIDTH).double()
        modules.append(nn.Sequential(tied, nn.Tanh(), tied))
    check(modules, schedule)


@rotated(name=["ZB-V", "DualPipeV", "V-Half", "V-Min"], pair=[(0, 3), (1, 2)])
def test_weights_tied_over_the_stages_of_a_rank(name: str, pair: tuple[int, int]) -> None:
    """A V puts the first and the last stage on one rank: they can share the embedding."""
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(NUM_STAGES)]
    first, second = pair
    modules[second].weight = modules[first].weight
    check(modules, schedules.get(name)(num_ranks=2, num_microbatches=4))


@rotated(is_leaf=[True, False], schedule=FOUR_STAGES)
def test_arguments_that_need_a_gradient_get_it(is_leaf: bool, schedule: Schedule) -> None:
    """Also if they were computed: what is behind them is gone through once."""
    modules = mlp()
    outside = nn.Linear(WIDTH, WIDTH).double()
    x, target = randn(8, WIDTH), randn(8, WIDTH)
    grads = []
    for run in (step_unsplit, lambda m, b: step_locally(m, schedule, b)):
        leaf = x.clone().requires_grad_()
        outside.zero_grad()
        record = run(modules, Batch((leaf if is_leaf else outside(leaf),), {}, target))
        grads.append([record.grads, leaf.grad, outside.weight.grad])
    assert grads[0][1] is not None
    assert_close("grads", grads[0], grads[1])


@rotated(is_whole=[True, False], schedule=FOUR_STAGES)
def test_keyword_arguments_that_need_a_gradient_get_it(is_whole: bool, schedule: Schedule) -> None:
    modules: list[nn.Module] = [
        Call(lambda layer, x, *, scale: torch.tanh(layer(x)) * scale) for _ in range(NUM_STAGES)
    ]
    x, target, scale = randn(8, WIDTH), randn(8, WIDTH), randn(*(() if is_whole else (8,)), WIDTH)
    spec = {"scale": Replicate() if is_whole else TensorChunkSpec(0)}
    leaf = scale.clone().requires_grad_()
    expected = step_unsplit(modules, Batch((x,), {"scale": leaf}, target))
    own = scale.clone().requires_grad_()
    batch = Batch((x,), {"scale": own}, target)
    assert_same(expected, step_locally(modules, schedule, batch, kwargs_chunk_spec=spec))
    assert leaf.grad is not None
    assert_close("gradient of scale", leaf.grad, own.grad)


def test_tensor_that_all_microbatches_share_has_one_gradient_at_a_time() -> None:
    """Each microbatch's was kept to the end of the step: as many times the tensor's memory."""
    module = Call(lambda layer, x, *, scale: torch.tanh(layer(x)) * scale.sum(0))
    scale = randn(7, WIDTH).requires_grad_()
    batch = Batch((randn(8, WIDTH),), {"scale": scale}, randn(8, WIDTH))
    counts = []

    def count_alive() -> int:
        return sum(x.shape == scale.shape and not x.requires_grad for x in live_tensors())

    before = count_alive()  # Other tests may have left some of this shape.

    def count_grads(action: Any, context: Any) -> None:
        context.run(action)
        counts.append(count_alive() - before)

    def main(pipeline: Pipeline) -> None:
        pipeline.register_custom_function(Backward, count_grads)
        pipeline.step(*batch.args, target=batch.target, **batch.kwargs)

    schedule = schedules.get("1F1B")(num_ranks=1, num_microbatches=4)
    run_locally([module], schedule, main, kwargs_chunk_spec={"scale": Replicate()})
    assert [1, 1, 1, 1] == counts


@pytest.mark.parametrize("sparse", [(), (0, 1, 2), (0, 2), (1,)], ids=str)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_a_shared_tensor_are_added_as_autograd_adds_them(
    is_leaf: bool, sparse: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    dense = [torch.randn(50, 2) * 10.0**power for power in (0, 4, -2)]
    grads = [x.to_sparse(1) if number in sparse else x for number, x in enumerate(dense)]
    before = [grad.clone() for grad in grads]
    sums = []
    for is_expected in (True, False):
        leaf = torch.ones(50, 2, requires_grad=True)
        tensor = leaf if is_leaf else leaf * 2
        if is_expected:
            torch.autograd.backward([tensor] * 3, grads)
        else:
            outside = OutsideGraphs()
            for grad in grads:
                outside.add(tensor, grad)
            outside.backward()
        assert leaf.grad is not None
        sums.append(leaf.grad.to_dense())
    is_mixed = len(sparse) in (1, 2)
    # Dense and sparse ones are added apart, so the order differs from autograd's.
    torch.testing.assert_close(*sums, **({} if is_mixed else {"rtol": 0.0, "atol": 0.0}))
    assert all(torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(before, grads, strict=True))


@every_schedule
def test_tensor_given_twice_gets_both_gradients(schedule: Schedule) -> None:
    modules = mlp()
    modules[0] = Call(lambda layer, a, b: layer(a) * b.sin())
    x, target = randn(8, WIDTH), randn(8, WIDTH)
    leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = step_unsplit(modules, Batch((leaf, leaf), {}, target))
    assert_same(expected, step_locally(modules, schedule, Batch((own, own), {}, target)))
    assert leaf.grad is not None
    assert_close("gradient of x", leaf.grad, own.grad)


@every_schedule
def test_parameters_of_the_loss_get_their_gradient(schedule: Schedule) -> None:
    """Split backwards went from the loss to the parameters of the stage only: those of the loss
    had no gradient, or in DualPipeV that of the microbatches whose backward was not split.
    """

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

        def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
            return mean_square(outputs * self.weight, target)

    modules, batch, loss = mlp(), mlp_batch(), Weighted()
    expected = step_unsplit(modules, batch, loss)
    wanted, loss.weight.grad = loss.weight.grad, None
    assert_same(expected, step_locally(modules, schedule, batch, loss_fn=loss))
    assert wanted is not None
    assert_close("gradient of the loss's weight", wanted, loss.weight.grad)


@rotated(is_frozen=[True, False], schedule=FOUR_STAGES)
def test_what_the_loss_is_given_gets_its_gradient(is_frozen: bool, schedule: Schedule) -> None:
    """A target, and a keyword argument of the loss; also if they alone need a gradient."""
    modules, (args, _, target) = mlp(), mlp_batch()
    if is_frozen:
        for module in modules:
            module.requires_grad_(False)
    weight = torch.rand(WIDTH, dtype=torch.float64)

    def loss_fn(outputs: Tensor, target: Tensor, *, weight: Tensor) -> Tensor:
        return mean_square(outputs * weight, target)

    found = []
    for is_split in (False, True):
        own_target, own_weight = target.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"weight": own_weight}
        zero_grad(modules)
        if is_split:
            run_locally(
                modules,
                schedule,
                lambda pipeline: pipeline.step(*args, target=own_target, loss_kwargs=options),  # noqa: B023
                loss_fn=loss_fn,
            )
        else:
            loss_fn(run_unsplit(modules, args, {}), own_target, **options).backward()
        assert own_target.grad is not None
        found.append([own_target.grad, own_weight.grad, list(grads_of(modules).values())])
    assert_close("gradients", *found)


@rotated(scales=[True, False], schedule=FOUR_STAGES)
def test_model_that_computes_its_own_loss(scales: bool, schedule: Schedule) -> None:
    modules = [*mlp(3), Call(lambda layer, x: layer(x).square().mean())]
    batch = mlp_batch()

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs

    expected = step_unsplit(modules, batch, loss_fn)
    actual = step_locally(modules, schedule, batch, loss_fn=loss_fn, scale_grads=scales)
    share = 1 if scales else NUM_MICROBATCHES
    wanted = {name: grad * share for name, grad in expected.grads.items() if grad is not None}
    assert_same_grads("step", wanted, [actual.grads])


@dataclass
class Found:
    """What torch takes for one value, though it holds a tensor."""

    logits: Tensor


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_last_stage_returns_an_object_that_only_the_loss_knows(name: str) -> None:
    modules = [*mlp(3), Call(lambda layer, x: Found(layer(x)))]
    args, _, target = mlp_batch()

    def loss_fn(outputs: Found, target: Tensor) -> Tensor:
        return mean_square(outputs.logits, target)

    loss_fn(run_unsplit(modules, args, {}), target).backward()
    expected = grads_of(modules)
    zero_grad(modules)
    run_locally(
        modules,
        FOUR_STAGES[name],
        lambda pipeline: pipeline.step(*args, target=target, return_outputs=False),
        loss_fn=loss_fn,
    )
    assert_same_grads("step", expected, [grads_of(modules)])
