"""Stages that run the whole model's forward are right, or refuse what would be wrong."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layered_models import LAYERS, WIDTH, Layers, Tied, own_backwards, some_tokens
from penstock.cutting import cut_between_layers
from penstock.errors import PartitionError, StageError


def test_converted_stages_are_refused() -> None:
    """Masks of later stages would still have the dtype of the example."""
    tokens = some_tokens()
    pieces = cut_between_layers(own_backwards(), 2, (tokens,))
    for module in pieces.modules:
        module.double()
    with pytest.raises(StageError, match=r"is a tensor of torch\.float64, but of torch\.float32"):
        pieces(tokens)


def test_hooks_of_the_model_run_around_it_and_later_ones_around_a_stage() -> None:
    model = Layers()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"tokens": 1 - kwargs["tokens"]}), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, output: 2 * output)
    tokens = some_tokens() % 2
    pieces = cut_between_layers(copy.deepcopy(model), 2, (tokens,))
    seen: list[Any] = []
    for module in pieces.modules:
        module.register_forward_hook(lambda *given: seen.append(given[2]))
    output = pieces(tokens)
    assert torch.equal(model(tokens=tokens), output)
    [[value], last] = seen
    assert (*tokens.shape, WIDTH) == value.shape
    assert last is output


class Reordered(Layers):
    """The layers may be called in another order than on the example."""

    is_reversed = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in reversed(self.layers) if self.is_reversed else self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_other_order_of_layers_is_refused() -> None:
    tokens = some_tokens()
    pieces = cut_between_layers(Reordered(), 2, (tokens,))
    pieces.get_stage_module(0).is_reversed = True
    with pytest.raises(StageError, match=r"calls layers\.3, but on the example it called"):
        pieces(tokens)


class Skipping(Layers):
    """The last layer may take the output of the first, in place of that of the third."""

    skips = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.layers[0](self.embed(tokens))
        for layer in self.layers[1:-1]:
            x = layer(x)
        logits: Tensor = self.head(self.norm(self.layers[-1](first if self.skips else x)))
        return logits


def test_value_that_another_stage_has_is_not_given() -> None:
    tokens = some_tokens()
    pieces = cut_between_layers(Skipping(), LAYERS, (tokens,))
    pieces.get_stage_module(2).skips = True
    with pytest.raises(StageError, match=r"of layers\.3 is not a tensor that this stage has"):
        pieces(tokens)


class Denoising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return torch.tanh(self.linear(x - noise))


class Noisy(Layers):
    """What is drawn before a layer is added to its input, and taken away by the layer."""

    def __init__(self) -> None:
        super().__init__(Denoising)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            noise = torch.randint(8, x.shape).to(x.dtype)
            x = layer(x + noise, noise)
        logits: Tensor = self.head(x)
        return logits


def test_random_numbers_between_layers_are_those_of_the_stage_before() -> None:
    model = Noisy().double()
    tokens = some_tokens()
    pieces = cut_between_layers(copy.deepcopy(model), LAYERS, (tokens,))
    torch.testing.assert_close(pieces(tokens), model(tokens), rtol=0, atol=1e-12)


class Filling(Layers):
    """Values of other stages are written into a tensor that every stage makes."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            own = torch.zeros(*tokens.shape, WIDTH)
            own[:] = x
            x = layer(own)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_values_written_into_a_tensor_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"__setitem__ needs the values of"):
        cut_between_layers(Filling(), LAYERS, (some_tokens(),))


class Normed(nn.Module):
    """A layer with a norm that it may share."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return normed


def test_buffer_that_two_stages_change_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = Layers(lambda: Normed(norm))
    with pytest.raises(PartitionError, match=r"changes the buffer layers\.0\.norm\."):
        cut_between_layers(model, 2, (some_tokens(),))


def test_frozen_parameter_is_frozen_in_all_stages() -> None:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    pieces = cut_between_layers(model, 2, (some_tokens(),))
    held = [module.embed.weight for module in pieces.modules]
    assert [False, False] == [weight.requires_grad for weight in held]


class Scaled(Layers):
    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        return super().forward(tokens) * scale


def test_other_value_of_an_input_is_refused() -> None:
    """What a stage does may depend on it, and only the example has shown what."""
    tokens = some_tokens()
    pieces = cut_between_layers(Scaled(), 2, (tokens, 1.0))
    with pytest.raises(StageError, match=r"input scale is 2\.0, not 1\.0"):
        pieces(tokens, 2.0)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda noise: noise.normal_(),
    "uniform_": lambda noise: noise.uniform_(),
    "bernoulli_": lambda noise: noise.bernoulli_(),
    "random_": lambda noise: noise.random_(8),
    "out": lambda noise: torch.randn(noise.shape, out=noise),
    "init": lambda noise: nn.init.normal_(noise),
    "init by others": lambda noise: nn.init.xavier_uniform_(noise),
    "init by layers": lambda noise: nn.init.kaiming_uniform_(noise),
    "dropout": lambda noise: nn.functional.dropout(noise.fill_(1), inplace=True),
}


class DrawnInPlace(Noisy):
    """As before, but what is drawn is used by the name of the tensor that it is drawn into."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            noise = torch.empty_like(x)
            self.draw(noise)
            x = layer(x + noise, noise)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_drawn_in_place_are_those_of_the_stage_before(
    draw: Callable[[Tensor], Any],
) -> None:
    """Each stage drew its own, unless the result of the call was used."""
    model = DrawnInPlace(draw).double()
    tokens = some_tokens()
    pieces = cut_between_layers(copy.deepcopy(model), LAYERS, (tokens,))
    torch.testing.assert_close(pieces(tokens), model(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "draw",
    [lambda noise: noise[0].normal_(), lambda noise: noise.view(-1).normal_()],
    ids=["a part", "all, by another shape"],
)
def test_random_numbers_drawn_into_a_part_of_a_tensor_are_refused(
    draw: Callable[[Tensor], Any],
) -> None:
    model = DrawnInPlace(draw).double()
    with pytest.raises(PartitionError) as caught:
        cut_between_layers(model, LAYERS, (some_tokens(),))
    assert "code between layers draws random numbers into a part of a tensor" in str(caught.value)


class GivingNoise(Layers):
    def forward(self, tokens: Tensor) -> Any:
        noise = torch.zeros(WIDTH)
        noise[1:].normal_()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), noise


def test_output_that_another_stage_draws_a_part_of_is_refused() -> None:
    pieces = cut_between_layers(GivingNoise(), 2, (some_tokens(),))
    with pytest.raises(StageError, match="draws random numbers into a part of a tensor, which is"):
        pieces(some_tokens())
