"""What each half frees: storages are watched, with the garbage collector off.

A `Watch` stands between the layers of a model. It knows by name the storage of the value
that passed, and of the gradient that came back ("name'"). What is alive at a moment is a
set of names.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # The first recomputation would load it, and leave a cycle of its own.
from mechanisms import MECHANISMS, functions
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from penstock.backward import SplitEngine, stage_backward_input, stage_backward_weight

Mechanism = Callable[[nn.Module], Callable[..., Any]]
on_both = pytest.mark.parametrize("mechanism", MECHANISMS)


class Storages:
    """Weak references to storages, by name."""

    def __init__(self) -> None:
        self._references: dict[str, StorageWeakRef] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        self._references[name] = StorageWeakRef(tensor.untyped_storage())

    def alive(self) -> set[str]:
        return {name for name, ref in self._references.items() if not ref.expired()}

    def names(self) -> set[str]:
        return set(self._references)


class Watch(nn.Module):
    def __init__(self, name: str, storages: Storages) -> None:
        super().__init__()
        self.name = name
        self.storages = storages

    def forward(self, x: Tensor) -> Tensor:
        self.storages.watch(self.name, x)
        if x.requires_grad:
            x.register_hook(lambda grad: self.storages.watch(self.name + "'", grad))
        return x


@pytest.fixture
def storages() -> Storages:
    return Storages()


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Remembering(torch.autograd.Function):
    """Keeps a value as an attribute of its context, which only the node's end can free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch) -> Tensor:
        ctx.factor = x.abs() + 1
        watch(ctx.factor)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


class Attention(nn.Module):
    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)
        self.qkv_watch = Watch("qkv", storages)
        self.probabilities = Watch("probabilities", storages)
        self.out_input = Watch("out input", storages)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_watch(self.qkv(x)).chunk(3, -1)
        mixed = self.probabilities((q @ k.mT).softmax(-1)) @ v
        y: Tensor = self.out(self.out_input(mixed.contiguous()))
        return y


class Upstream(nn.Module):
    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.context_watch = Watch("context attribute", storages)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Remembering.apply(x, self.context_watch)
        return y


def _mlp(storages: Storages) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8),
        Watch("gelu input", storages),
        nn.GELU(),
        Watch("linear input", storages),
        nn.Linear(8, 4),
        Watch("norm input", storages),
        nn.LayerNorm(4),
        Watch("last input", storages),
        nn.Linear(4, 4),
    )


def _convolution(storages: Storages) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 3, 3, padding=1),
        Watch("gelu input", storages),
        nn.GELU(),
        Watch("conv input", storages),
        nn.Conv1d(3, 3, 1),
        Watch("output", storages),
        nn.Tanh(),
    )


def _upstream(storages: Storages) -> nn.Module:
    last = Watch("linear input", storages)
    return nn.Sequential(Upstream(storages), last, nn.Linear(4, 4))


# For each model: what W needs of what is watched. A gradient at the output of a product is
# that product's; the one at its input is not needed after I.
MODELS: list[tuple[Callable[[Storages], nn.Module], set[str]]] = [
    (_mlp, {"linear input", "last input", "gelu input'", "norm input'"}),
    (_convolution, {"conv input", "gelu input'", "output'"}),
    (Attention, {"out input", "qkv'"}),
    (_upstream, {"linear input"}),
]
on_models = pytest.mark.parametrize(
    ("build", "needed"), MODELS, ids=[build.__name__.strip("_") for build, _ in MODELS]
)


def _input(storages: Storages) -> Tensor:
    x = torch.randn(2, 3, 4, requires_grad=True)
    storages.watch("x", x)
    return x


def _output_grad(storages: Storages) -> Tensor:
    grad = torch.randn(2, 3, 4)
    storages.watch("output grad", grad)
    return grad


@on_both
@on_models
def test_input_half_keeps_what_the_weight_half_needs_and_that_frees_all(
    build: Any, needed: set[str], mechanism: Mechanism, storages: Storages
) -> None:
    """The pass and the weight half may still be held: they keep nothing but the inputs."""
    split = mechanism(build(storages))
    run = split((_input(storages),), {})
    _, weight_half = run.backward_input(_output_grad(storages))
    assert needed == storages.alive() - {"x", "output grad"}
    weight_half()
    assert {"x"} == storages.alive()
    del run, weight_half
    assert set() == storages.alive()


@on_both
@on_models
def test_outputs_that_are_still_held_keep_nothing_else_alive(
    build: Any, needed: set[str], mechanism: Mechanism, storages: Storages
) -> None:
    split = mechanism(build(storages))
    run = split((_input(storages),), {})
    held = run.outputs
    _, weight_half = run.backward_input(_output_grad(storages))
    del run
    # The node of a Python function lives as long as the outputs, and its attributes with it;
    # the input is a leaf, which its accumulator holds.
    unavoidable = {"x", "output grad", "context attribute"}
    assert needed == storages.alive() - unavoidable
    weight_half()
    assert set() == storages.alive() - {"x", "context attribute"}
    assert held is not None


@on_both
@on_models
def test_pass_or_weight_half_that_never_runs_frees_all_when_it_is_dropped(
    build: Any, needed: set[str], mechanism: Mechanism, storages: Storages
) -> None:
    split = mechanism(build(storages))
    run = split((_input(storages),), {})
    assert needed & storages.names() <= storages.alive()
    del run
    assert set() == storages.alive()
    run = split((_input(storages),), {})
    _, weight_half = run.backward_input(_output_grad(storages))
    del run, weight_half
    assert set() == storages.alive()


@on_both
def test_stage_without_differentiable_input_frees_all_in_the_weight_half(
    mechanism: Mechanism, storages: Storages
) -> None:
    split = mechanism(_mlp(storages))
    run = split((torch.randn(2, 3, 4),), {})
    held = run.outputs
    _, weight_half = run.backward_input(_output_grad(storages))
    del run
    weight_half()
    assert set() == storages.alive() - {"output grad"}
    del held, weight_half
    assert set() == storages.alive()


@on_both
def test_output_that_nobody_used_keeps_nothing_alive_after_the_input_half(
    mechanism: Mechanism, storages: Storages
) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Linear(4, 4)
            self.aside = nn.Sequential(
                nn.GELU(), Watch("aside", storages), nn.Linear(4, 4), Watch("aside out", storages)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x), self.aside(x)

    split = mechanism(Auxiliary())
    run = split((_input(storages),), {})
    assert "aside" in storages.alive()
    _, weight_half = run.backward_input((torch.randn(2, 3, 4), None))
    del run
    assert {"x"} == storages.alive()
    weight_half()
    del weight_half
    assert set() == storages.alive()


@on_both
def test_parameters_grads_share_no_memory_with_what_callers_hold(
    mechanism: Mechanism, storages: Storages
) -> None:
    """A first gradient that is the arrived one itself must be copied, not kept."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2, 3, 4))
            self.same = nn.Parameter(torch.zeros(2, 3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift + self.same

    model = Shifted()
    run = mechanism(model)((_input(storages),), {})
    grad = _output_grad(storages)
    (dx,), weight_half = run.backward_input(grad)
    weight_half()
    owners = [grad, dx, model.shift.grad, model.same.grad]
    storage_of = [owner.untyped_storage().data_ptr() for owner in owners]
    assert storage_of[2] not in storage_of[:2]
    assert storage_of[3] not in storage_of[:3]


@on_both
def test_many_steps_leave_nothing_behind(mechanism: Mechanism, storages: Storages) -> None:
    model = _mlp(storages)
    split = mechanism(model)
    pending = []
    for _ in range(3):
        run = split((_input(storages),), {})
        pending.append(run.backward_input(_output_grad(storages))[1])
    del run
    gc.enable()
    gc.collect()
    gc.disable()
    before = _num_tensors()
    for weight_half in pending:
        weight_half()
    pending.clear()
    del weight_half
    assert set() == storages.alive()
    # Each parameter now has a gradient, and nothing else is left.
    assert _num_tensors() <= before


def _num_tensors() -> int:
    """All tensors that Python knows; by type, since `isinstance` asks lazy modules too much."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


class Checkpointed(nn.Module):
    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.block = _mlp(storages)
        self.num_runs = 0

    def _run(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        y: Tensor = self.block(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return y


@on_both
def test_forward_keeps_nothing_of_the_inside_of_a_checkpointed_block(
    mechanism: Mechanism, storages: Storages
) -> None:
    model = Checkpointed(storages)
    run = mechanism(model)((_input(storages),), {})
    assert {"gelu input", "linear input", "norm input", "last input", "x"} == storages.names()
    assert {"x"} == storages.alive()
    assert 1 == model.num_runs
    _, weight_half = run.backward_input(_output_grad(storages))
    del run
    assert set() == storages.alive() & {"gelu input", "norm input", "last input'", "linear input'"}
    weight_half()
    del weight_half
    assert set() == storages.alive()
    assert 2 == model.num_runs


def test_later_forward_keeps_nothing_of_the_inside_of_a_checkpointed_block(
    storages: Storages,
) -> None:
    """The first forward is checked more closely than others."""
    engine = SplitEngine(Checkpointed(storages))
    engine.forward(_input(storages)).backward(_output_grad(storages))
    run = engine.forward(_input(storages))
    assert {"x"} == storages.alive() - {"output grad"}
    run.backward(_output_grad(storages))


def test_engine_defers_the_products_of_a_checkpointed_block(storages: Storages) -> None:
    run = SplitEngine(Checkpointed(storages)).forward(_input(storages))
    _, pending = run.backward_input(_output_grad(storages))
    del run
    kept = {"linear input", "last input", "gelu input'", "norm input'"}
    assert kept == storages.alive() - {"x", "output grad"}
    pending.run()
    assert set() == storages.alive()


def test_weight_half_frees_a_checkpointed_blocks_inputs_though_its_outputs_live_on(
    storages: Storages,
) -> None:
    run = SplitEngine(Checkpointed(storages)).forward(_input(storages))
    outputs = run.outputs
    _, pending = run.backward_input(_output_grad(storages))
    pending.run()
    assert set() == storages.alive() & {"linear input", "last input"}
    assert outputs.grad_fn is not None  # The graph is held to here.


def test_retained_groups_keep_what_another_weight_half_needs(storages: Storages) -> None:
    model = _mlp(storages)
    x = torch.randn(2, 3, 4, requires_grad=True)
    outputs = model(x)
    weights = list(model.parameters())
    _, groups = stage_backward_input(outputs, torch.randn(2, 3, 4), [x], weights)
    del outputs
    kept = storages.alive()
    stage_backward_weight(weights, groups, retain_graph=True)
    assert kept == storages.alive()
    stage_backward_weight(weights, groups)
    assert set() == storages.alive()


def test_watch_sees_a_leak(storages: Storages) -> None:
    """The tests above can fail: a reference cycle keeps its storage alive."""
    run = functions(_mlp(storages))((_input(storages),), {})
    _, weight_half = run.backward_input(_output_grad(storages))
    cycle: list[Any] = [weight_half]
    cycle.append(cycle)
    del run, weight_half, cycle
    assert "linear input" in storages.alive()
    gc.collect()
    assert set() == storages.alive()
