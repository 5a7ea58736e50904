"""What the engine must not tap, and what it must refuse rather than drop a gradient."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from penstock import LocalGroup, PipelineStage, local_ranks
from penstock.backward import SplitEngine
from penstock.errors import BackwardError


def _input() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def _assert_like_plain(model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    x, grad = _input(), torch.randn(3, 4)
    reference = x.detach().requires_grad_()
    plain(reference).backward(grad)
    engine = SplitEngine(model)
    for _ in range(2):  # The first pass is checked more closely; the second must agree.
        model.zero_grad()
        (dx, *_) = engine.forward(x).backward(grad)
        torch.testing.assert_close(dx, reference.grad)
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)


class ComputedWeights(nn.Module):
    """Runs its layer on parameters that are computed, as merged adapters do."""

    def __init__(self, name: str, is_checkpointed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.delta = nn.Parameter(torch.randn_like(self.layer.get_parameter(name)))
        self.name, self.is_checkpointed = name, is_checkpointed

    def run(self, x: Tensor) -> Tensor:
        params = {self.name: self.layer.get_parameter(self.name) + self.delta}
        y: Tensor = torch.func.functional_call(self.layer, params, (x,))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            y: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return y
        return self.run(x)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_layer_called_with_computed_parameters_passes_their_gradients_on(
    name: str, is_checkpointed: bool
) -> None:
    _assert_like_plain(ComputedWeights(name, is_checkpointed))


class InTransform(nn.Module):
    def __init__(self, transform: Callable[..., Tensor], num_dims: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.transform, self.num_dims = transform, num_dims

    def forward(self, x: Tensor) -> Tensor:
        inner = x.view((*x.shape[:1], *(1,) * (self.num_dims - 2), *x.shape[1:]))
        return self.transform(self.layer, inner).view(x.shape)


@pytest.mark.parametrize("num_dims", [2, 4])
@pytest.mark.parametrize(
    "transform",
    [lambda layer, x: torch.func.vjp(layer, x)[0], lambda layer, x: torch.vmap(layer)(x)],
    ids=["vjp", "vmap"],
)
def test_layer_inside_a_function_transform_keeps_its_gradients(
    transform: Callable[..., Tensor], num_dims: int
) -> None:
    _assert_like_plain(InTransform(transform, num_dims))


class SelfDifferentiating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        energy = self.layers(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_module_that_differentiates_itself_is_refused_in_its_first_forward(
    shape: tuple[int, ...],
) -> None:
    engine = SplitEngine(SelfDifferentiating())
    with pytest.raises(BackwardError, match="A module that differentiates itself"):
        engine.forward(torch.randn(shape, requires_grad=True))


class KeepsAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(4, 4), nn.Linear(4, 4)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.router(x).pow(2).mean()
        y: Tensor = self.layer(x)
        return y


def test_backward_of_a_loss_kept_on_the_module_is_refused() -> None:
    model = KeepsAuxiliaryLoss()
    SplitEngine(model).forward(_input())
    with pytest.raises(BackwardError, match="a backward reached the graph"):
        model.loss.backward()


@pytest.mark.parametrize("last", [nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU()])
def test_loss_of_another_forward_pass_is_refused(last: nn.Module) -> None:
    engine = SplitEngine(nn.Sequential(nn.Linear(4, 4), last))
    first, second = engine.forward(_input()), engine.forward(_input())
    with pytest.raises(BackwardError, match="a loss computed from its own outputs"):
        first.backward(loss=second.outputs.sum())


class PassesItsInputOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def test_graph_before_an_input_that_is_returned_can_be_run_backward_from_elsewhere() -> None:
    """It is not the engine's: the stage before may run it, or another loss."""
    leaf = _input()
    x = leaf * 2
    engine = SplitEngine(PassesItsInputOn())
    engine.forward(x).backward((torch.ones(3, 4), torch.ones(3, 4)))
    x.sum().backward()
    assert torch.equal(torch.full((3, 4), 2.0), leaf.grad)


def test_nothing_runs_in_the_input_half_of_a_stage_without_differentiable_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    log: list[str] = []
    model[1].register_full_backward_pre_hook(lambda *_: log.append("ran"))
    grads, pending = SplitEngine(model).forward(torch.randn(3, 4)).backward_input(torch.ones(3, 4))
    assert (None,) == grads
    assert [] == log
    pending.run()
    assert ["ran"] == log
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_converted_in_place_are_looked_at_again_after_a_refresh() -> None:
    model = nn.Linear(4, 4)
    engine = SplitEngine(model)
    engine.forward(_input()).backward(torch.ones(3, 4))
    model.zero_grad()
    for param in model.parameters():
        param.data = param.data.to(torch.complex64)
    engine.refresh()
    x, grad = (torch.randn(3, 4, dtype=torch.complex64) for _ in range(2))
    expected = torch.autograd.grad(model(x), [*model.parameters()], grad)
    engine.forward(x.requires_grad_()).backward(grad)
    torch.testing.assert_close([param.grad for param in model.parameters()], [*expected])


def test_stage_refreshes_its_engine() -> None:
    def main(group: LocalGroup) -> None:
        layer = nn.Linear(4, 4)
        stage = PipelineStage(layer, 0, 1, "cpu", group=group)
        stage.forward(0, (_input(),), {}, is_split=True)
        for param in layer.parameters():
            param.data = param.data.to(torch.complex64)
        stage.refresh()
        x, grad = (torch.randn(3, 4, dtype=torch.complex64) for _ in range(2))
        expected = torch.autograd.grad(layer(x), [*layer.parameters()], grad)
        _, run_weights = stage.forward(0, (x.requires_grad_(),), {}, is_split=True).backward([grad])
        run_weights()
        torch.testing.assert_close([param.grad for param in layer.parameters()], [*expected])

    local_ranks(1, main)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def test_gradient_that_came_in_the_input_half_is_found_to_be_modified() -> None:
    """A parameter that is merely added gets the output's gradient itself, not a copy."""
    buffer = torch.ones(3, 4)
    _, pending = SplitEngine(Added()).forward(_input()).backward_input(buffer)
    buffer.fill_(100)
    with pytest.raises(BackwardError, match=r"shape \(3, 4\) that the weight backward needs"):
        pending.run()


def test_parameters_replaced_after_preparation_get_their_gradients() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    engine = SplitEngine(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    engine.forward(_input()).backward(torch.ones(3, 4))
    assert all(param.grad is not None for param in model.parameters())


def test_forward_set_by_the_user_after_preparation_is_kept_and_used() -> None:
    model = nn.Linear(4, 4)
    engine = SplitEngine(model)
    model.forward = lambda x: x * 7  # type: ignore[method-assign]
    assert torch.equal(torch.full((1, 4), 7.0), engine.forward(torch.ones(1, 4)).outputs)
    assert "forward" in model.__dict__


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(BackwardError, match=r"parameter 0\.weight is lazy .* Run the module once"):
        SplitEngine(nn.Sequential(nn.LazyLinear(3)))


def test_gradient_made_in_inference_mode_is_taken() -> None:
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        grad = torch.ones(3, 4)
    SplitEngine(model).forward(_input()).backward(grad)
    assert model.bias.grad is not None
    assert torch.equal(torch.full((4,), 3.0), model.bias.grad)


class PlainTensorInside(nn.Module):
    """A checkpointed layer on a tensor that requires a gradient but is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.prompt = torch.randn(3, 4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + checkpoint(self.layer, self.prompt, use_reentrant=False)
        return y


def test_checkpointed_layer_on_a_tensor_that_nobody_knows_is_refused() -> None:
    forward = SplitEngine(PlainTensorInside()).forward(_input())
    with pytest.raises(BackwardError, match=r"weight of shape \(4, 4\), .* register it as one"):
        forward.backward_input(torch.ones(3, 4))


class WithTangent(nn.Module):
    """Returns a layer's output and its derivative along the input, by forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            y = torch.sin(self.layer(forward_ad.make_dual(x[None], x[None].cos())))
            value, tangent = forward_ad.unpack_dual(y)
            return (value + tangent)[0]


# torch scripts its own formulas when forward mode is first used; the kind of warning depends on its
# version.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_forward_mode_inside_a_module_reaches_its_weights() -> None:
    _assert_like_plain(WithTangent())


@pytest.mark.parametrize("make_layer", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(3, 3, 1)])
@pytest.mark.parametrize(
    ("name", "is_trained"), [("weight", True), ("weight", False), ("bias", True), ("bias", False)]
)
def test_parameter_switched_after_the_forward_gets_no_gradient(
    make_layer: Callable[[], nn.Module], name: str, is_trained: bool
) -> None:
    """As in autograd: it must need a gradient in the forward and in the backward."""
    layer = make_layer()
    param = layer.get_parameter(name).requires_grad_(is_trained)
    engine = SplitEngine(layer)
    for _ in range(2):
        forward = engine.forward(_input())
        param.requires_grad_(not is_trained)
        forward.backward(torch.ones(3, 4))
        assert param.grad is None
        other = layer.get_parameter("bias" if name == "weight" else "weight")
        assert other.grad is not None
        param.requires_grad_(is_trained)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_layer_without_features_runs(sizes: tuple[int, int]) -> None:
    layer = nn.Linear(*sizes)
    x = torch.randn(2, 5, sizes[0], requires_grad=True)
    (dx,) = SplitEngine(layer).forward(x).backward(torch.ones(2, 5, sizes[1]))
    assert dx is not None
    assert layer.weight.grad is not None
    assert torch.equal(torch.full((sizes[1],), 10.0), layer.bias.grad)


def test_layer_on_the_meta_device_runs() -> None:
    layer = nn.Linear(4, 4, device="meta")
    x = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    SplitEngine(layer).forward(x).backward(torch.empty(2, 3, 4, device="meta"))
    assert layer.weight.grad is not None


def test_backward_in_inference_mode_is_refused() -> None:
    forward = SplitEngine(nn.Linear(4, 4)).forward(_input())
    with (
        torch.inference_mode(),
        pytest.raises(BackwardError, match=r"^a backward was started inside torch.inference_mode"),
    ):
        forward.backward(torch.ones(3, 4))


def test_complex_loss_is_refused() -> None:
    forward = SplitEngine(nn.Linear(4, 4, dtype=torch.complex64)).forward(
        torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    )
    with pytest.raises(BackwardError, match=r"a complex number\. Expected a real one"):
        forward.backward(loss=forward.outputs.sum())
