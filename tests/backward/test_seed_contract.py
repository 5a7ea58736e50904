"""The calls that the reference's own tests make of the three functions hold here."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import stage_backward, stage_backward_input, stage_backward_weight

# The reference's own sizes. Its tests compare with assert_close's defaults, ours to the last bit.
WIDTH, BATCH = 512, 256


class Perceptron(nn.Module):
    """Two linear layers with a relu between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(WIDTH, WIDTH)
        self.net2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.net1(x).relu())


class Pair:
    """Two equal stages: one for the functions, one for plain autograd."""

    def __init__(self) -> None:
        self.stage, self.plain = Perceptron(), Perceptron()
        self.plain.load_state_dict(self.stage.state_dict())
        self._target = torch.randn(BATCH, WIDTH)

    def loss(self, out: Tensor) -> Tensor:
        return nn.functional.mse_loss(out, self._target, reduction="sum")

    def run_plain(self, x: Tensor) -> Tensor:
        """Plain forward and backward; the gradient of `x`."""
        own = x.detach().clone().requires_grad_()
        self.loss(self.plain(own)).backward()
        assert own.grad is not None
        return own.grad

    def assert_same_param_grads(self) -> None:
        for name, param in self.plain.named_parameters():
            assert torch.equal(param.grad, self.stage.get_parameter(name).grad), name


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def test_full_backward_of_a_loss_gives_input_and_parameter_gradients() -> None:
    pair, x = Pair(), batch()
    grads = stage_backward(
        stage_output=pair.loss(pair.stage(x)), output_grads=None, input_values=(x,)
    )
    assert torch.equal(pair.run_plain(x), grads[0])
    pair.assert_same_param_grads()


def test_input_half_sets_input_gradients_and_leaves_parameters_alone() -> None:
    pair, x = Pair(), batch()
    grads, _ = stage_backward_input(
        stage_outputs_or_loss=(pair.loss(pair.stage(x)),),
        output_grads=None,
        input_values=[x],
        weights=pair.stage.parameters(),
    )
    expected = pair.run_plain(x)
    assert torch.equal(expected, x.grad)
    assert torch.equal(expected, grads[0])
    assert [None] * 4 == [param.grad for param in pair.stage.parameters()]


def test_weight_half_gives_parameter_gradients() -> None:
    pair, x = Pair(), batch()
    _, groups = stage_backward_input(
        stage_outputs_or_loss=(pair.loss(pair.stage(x)),),
        output_grads=None,
        input_values=[x],
        weights=pair.stage.parameters(),
    )
    stage_backward_weight(pair.stage.parameters(), groups, retain_graph=True)
    pair.run_plain(x)
    pair.assert_same_param_grads()


def test_weight_half_run_again_adds_again_if_the_graph_was_retained() -> None:
    pair, x = Pair(), batch()
    _, groups = stage_backward_input([pair.loss(pair.stage(x))], None, [x], pair.stage.parameters())
    stage_backward_weight(pair.stage.parameters(), groups, retain_graph=True)
    stage_backward_weight(pair.stage.parameters(), groups)
    pair.run_plain(x)
    pair.run_plain(x)
    pair.assert_same_param_grads()


def test_weight_half_returns_the_gradients_in_the_order_of_the_weights() -> None:
    pair, x = Pair(), batch()
    params = list(pair.stage.parameters())
    _, groups = stage_backward_input([pair.loss(pair.stage(x))], None, [x], iter(params))
    grads = stage_backward_weight(iter(params), groups)
    assert all(grad is param.grad for grad, param in zip(grads, params, strict=True))


def test_ten_microbatches_accumulate() -> None:
    pair = Pair()
    for _ in range(10):
        x = batch()
        _, groups = stage_backward_input(
            stage_outputs_or_loss=(pair.loss(pair.stage(x)),),
            output_grads=None,
            input_values=[x],
            weights=pair.stage.parameters(),
        )
        stage_backward_weight(pair.stage.parameters(), groups)
        pair.run_plain(x)
    pair.assert_same_param_grads()


@pytest.mark.parametrize(
    "place_of",
    [
        lambda first, second: (first, second),
        lambda first, _: (first,),
        lambda first, _: (first, None),
        lambda first, second: (None, first, None, second),
    ],
    ids=["two gradients", "one gradient", "a gradient and None", "gradients among Nones"],
)
def test_hand_made_gradients_replace_those_that_arrived_and_are_summed(
    place_of: Callable[[Tensor, Tensor], tuple[Tensor | None, ...]],
) -> None:
    stage, x = Perceptron(), batch()
    _, groups = stage_backward_input(
        stage_outputs_or_loss=[stage(x).sum()],
        output_grads=None,
        input_values=[x],
        weights=stage.parameters(),
    )
    expected: dict[str, Tensor] = {}
    inputs = {"net1": x.detach(), "net2": stage.net1(x).relu().detach()}
    for group in groups:
        layer = name_of_layer(stage, group["params"])
        made = [place_of(*torch.randn(2, BATCH, WIDTH)) for _ in group["grads"]]
        group["grads"] = made
        # One node uses the parameters of a linear layer: it gets the sum.
        total = sum(grad for grad in made[0] if grad is not None)
        expected[f"{layer}.weight"] = total.t() @ inputs[layer]
        expected[f"{layer}.bias"] = total.sum(0)
    stage_backward_weight(stage.parameters(), groups)
    assert expected.keys() == {name for name, _ in stage.named_parameters()}
    for name, grad in expected.items():
        assert torch.equal(grad, stage.get_parameter(name).grad), name


def test_hand_made_nones_alone_add_nothing() -> None:
    stage, x = Perceptron(), batch()
    _, groups = stage_backward_input([stage(x).sum()], None, [x], stage.parameters())
    for group in groups:
        group["grads"] = [(None, None)]
    stage_backward_weight(stage.parameters(), groups)
    assert [None] * 4 == [param.grad for param in stage.parameters()]


def name_of_layer(stage: nn.Module, params: list[Tensor]) -> str:
    """The layer whose weight and bias, in any order, are the parameters of a group."""
    names = {id(param): name for name, param in stage.named_parameters()}
    (layer,) = {names[id(param)].partition(".")[0] for param in params}
    assert 2 == len(params)
    return layer
