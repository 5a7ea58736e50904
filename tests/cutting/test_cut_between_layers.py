"""Models cut between their layers, without tracing, train as the whole model does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from cut_training import NUM_MICROBATCHES, ROWS
from layered_models import (
    LAYERS,
    Appending,
    Biased,
    Changing,
    Checkpointed,
    Layers,
    Listed,
    Mixing,
    OwnBackward,
    Shelf,
    Tied,
    Translator,
    experts,
    in_place,
    loss_of,
    own_backwards,
    some_tokens,
)
from penstock.cutting import CutModel, cut_any, cut_between_layers
from penstock.errors import PartitionError, PipeliningShapeError, StageError


def train(
    pieces: CutModel, schedule: str, inputs: dict[str, Tensor], target: Tensor
) -> dict[str, Tensor | None]:
    """The gradients of all stages after one step; those of tied parameters are equal."""
    stages_per_rank = penstock.schedules.get(schedule).stages_per_rank

    def run_rank(group: penstock.LocalGroup) -> list[tuple[str, Tensor | None]]:
        num_ranks = pieces.num_stages // stages_per_rank
        generator = penstock.schedules.get(schedule)
        own = generator(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
        stages = [
            pieces.build_stage(stage, "cpu", group) for stage in own.placement.stages_of(group.rank)
        ]
        pipeline = penstock.Pipeline(stages, own, loss_fn=loss_of)
        last = any(stage.is_last for stage in stages)
        pipeline.step(**inputs, target=target if last else None)
        return [(n, p.grad) for stage in stages for n, p in stage.submod.named_parameters()]

    gradients: dict[str, Tensor | None] = {}
    for pairs in penstock.local_ranks(pieces.num_stages // stages_per_rank, run_rank):
        for name, gradient in pairs:
            known = gradients.setdefault(name, gradient)
            assert known is None or gradient is None or torch.equal(known, gradient)
    return gradients


def check(model: nn.Module, pieces: CutModel, schedule: str, inputs: dict[str, Tensor]) -> None:
    """Raises unless a step of the stages gives the gradients of the whole model."""
    whole = copy.deepcopy(model)
    target = some_tokens()
    parts = {name: value.chunk(NUM_MICROBATCHES) for name, value in inputs.items()}
    for mb, labels in enumerate(target.chunk(NUM_MICROBATCHES)):
        output = whole(**{name: values[mb].clone() for name, values in parts.items()})
        (loss_of(output, labels) / NUM_MICROBATCHES).backward()
    actual = train(pieces, schedule, inputs, target)
    for name, parameter in whole.named_parameters():
        found = actual[name]
        if parameter.grad is None or found is None:  # An expert that no token took.
            assert parameter.grad is found, name
        else:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


MODELS = {
    "own backwards": own_backwards,
    "in place": in_place,
    "appending": Appending,
    "experts": experts,
    "tied": Tied,
    "biased": Biased,
    "checkpointed": Checkpointed,
    "shelf": Shelf,
    "changing": Changing,
}


def example_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:ROWS] for name, value in inputs.items()}


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("name", MODELS)
def test_stages_of_layers_train_as_the_whole_model(name: str, schedule: str) -> None:
    model = MODELS[name]().double()
    inputs = {"tokens": some_tokens()}
    pieces = cut_between_layers(copy.deepcopy(model), 4, mb_kwargs=example_of(inputs))
    assert pieces.repeats_inputs
    some = inputs["tokens"][:ROWS]
    assert torch.equal(model(some.clone()), pieces(some))
    check(model, pieces, schedule, inputs)


@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_encoder_and_decoder_train_as_the_whole_model(num_stages: int) -> None:
    model = Translator().double()
    inputs = {"tokens": some_tokens(), "targets": some_tokens()}
    pieces = cut_between_layers(copy.deepcopy(model), num_stages, mb_kwargs=example_of(inputs))
    example = example_of(inputs)
    assert torch.equal(model(**example)["memory"], pieces(**example)["memory"])
    check(model, pieces, "ZB-H1", inputs)


def test_outputs_of_all_stages_arrive() -> None:
    model = Listed().double()
    tokens = some_tokens()[:ROWS]
    pieces = cut_between_layers(copy.deepcopy(model), 4, (tokens,))
    expected, actual = model(tokens)["values"], pieces(tokens)["values"]
    assert all(map(torch.equal, expected, actual))
    check(model, pieces, "ZB-V", {"tokens": some_tokens()})


def test_stages_hold_the_models_own_parameters_under_their_names() -> None:
    model = Tied().double()
    pieces = cut_between_layers(model, 2, (some_tokens()[:ROWS],))
    first, last = (pieces.get_stage_module(stage).state_dict() for stage in (0, 1))
    assert model.state_dict().keys() == first.keys() | last.keys()
    assert {"embed.weight", "head.weight"} == first.keys() & last.keys()
    assert model.layers[0].weight is pieces.get_stage_module(0).layers[0].weight
    assert ("embed.weight",) == pieces.info().stages[1].tied
    assert isinstance(pieces.get_stage_module(0), Tied)


def test_model_on_the_meta_device_is_cut_without_values() -> None:
    with torch.device("meta"):
        model = Tied()
    pieces = cut_between_layers(model, 2, (some_tokens()[:ROWS],))
    module = pieces.get_stage_module(1).to_empty(device="cpu")
    module.load_state_dict(
        {k: v for k, v in Tied().state_dict().items() if k in module.state_dict()}
    )
    stage = pieces.build_stage(1, "cpu", penstock.local_ranks(1, lambda group: group)[0])
    assert stage.is_last


def test_model_that_reads_values_on_the_meta_device_fails_with_what_to_do() -> None:
    class Reading(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum().item() else -x)

    with torch.device("meta"):
        model = Reading()
    with pytest.raises(RuntimeError, match="item") as caught:
        cut_between_layers(model, 2, (some_tokens()[:ROWS],))
    [note] = {*caught.value.__notes__}
    assert note.startswith(
        "The model ran on the meta device, where tensors have no values to read."
    )


def test_loss_counts_with_the_last_layer() -> None:
    tokens = some_tokens()
    loss = penstock.LayerCost("loss", 1e9, 0, 0)
    policy = penstock.Balanced(2, loss=loss)
    assert "layers.3" in cut_between_layers(own_backwards(), policy, (tokens,)).cut


class Noisy(Layers):
    """Noise that is drawn once, and a tied embedding with dropout, go to all layers."""

    def __init__(self) -> None:
        super().__init__(Mixing)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Any:
        x = self.drop(self.embed(tokens))
        noise = torch.rand(tokens.shape).unsqueeze(-1).to(x.dtype) if self.training else 0 * x
        bias = noise + x
        for layer in self.layers:
            x = layer(x, bias=bias)
        return {"logits": self.head(x), "bias": bias}


@pytest.mark.parametrize("is_training", [True, False])
def test_random_numbers_are_drawn_once(is_training: bool) -> None:
    model = Noisy().double()
    tokens = some_tokens()[:ROWS]
    pieces = cut_between_layers(copy.deepcopy(model).train(is_training), 4, (tokens,))
    for module in pieces.modules:
        module.train()
    given = []

    def run(stage: int, module: nn.Module, values: Any) -> Any:
        given.append((values, module(*values, tokens=tokens)))
        return given[-1][1]

    outputs = pieces.run_stages(run, ())
    biases = [value for values, _ in given[1:] for value in values]
    assert any(value is outputs["bias"] for value in biases)
    for module in pieces.modules:
        module.eval()
    assert torch.equal(model.eval()(tokens)["logits"], pieces(tokens)["logits"])


class Mixed(Layers):
    """Code between the layers uses the output of the first one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.layers[0](self.embed(tokens))
        for layer in self.layers[1:]:
            x = layer(x) + first
        logits: Tensor = self.head(self.norm(x))
        return logits


class Choosing(Layers):
    """The values between layers decide what it does."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x / 2
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Mixed, r"the model returns a value of layers\.\d, which another stage computes"),
        (Choosing, r"__bool__ needs the values of layers\.\d"),
    ],
)
def test_values_that_cannot_be_sent_are_refused(make: type[Layers], reason: str) -> None:
    with pytest.raises(PartitionError, match=reason):
        cut_between_layers(make(), LAYERS, (some_tokens(),))


class Reversible(torch.autograd.Function):
    """Layers in the forward of a Function, which computes their gradients itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Reversed(Layers):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(Reversible.apply(self.embed(tokens), self.layers))
        return logits


def test_layers_within_an_autograd_function_are_not_separated() -> None:
    """Reformer's layers are: gradients stopped at the cut."""
    with pytest.raises(PartitionError, match="calls 0 entries of module lists, too few"):
        cut_between_layers(Reversed(), 2, (some_tokens(),))


class Dropping(Layers):
    """Layers may be dropped at random, as in models of transformers."""

    layerdrop = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    continue
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_model_that_never_drops_layers_is_traced() -> None:
    model = Dropping().double()
    inputs = {"tokens": some_tokens()}
    pieces = cut_any(copy.deepcopy(model), 2, mb_kwargs=example_of(inputs))
    assert not pieces.repeats_inputs
    check(model, pieces, "1F1B", inputs)


def test_model_that_drops_layers_is_refused() -> None:
    model = Dropping()
    model.layerdrop = 0.5
    tokens = some_tokens()
    with pytest.raises(penstock.errors.TraceError, match="data-dependent"):
        penstock.cut(model, (tokens,), split_policy=penstock.Balanced(2))
    model.layerdrop = 0.0
    pieces = cut_between_layers(model, 2, (tokens,))
    pieces.get_stage_module(0).layerdrop = 1.0
    with pytest.raises(StageError, match=r"did not call layers\.0.*turn off layer dropping"):
        pieces(tokens)


def test_choice_of_the_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="penstock"):
        pieces = cut_any(own_backwards(), 2, (some_tokens(),))
    assert pieces.repeats_inputs
    assert "Layers was cut between its layers" in caplog.text
    assert "it calls the autograd Function Doubled" in caplog.text


def test_model_that_cannot_be_cut_names_all_reasons() -> None:
    model = Layers(OwnBackward)
    model.layers = nn.ModuleList([OwnBackward()])
    with pytest.raises(PartitionError, match=r"(?s)by tracing it.*between its modules.*too few"):
        cut_any(model, 2, (some_tokens(),))


def test_inputs_unlike_the_example_are_refused() -> None:
    tokens = some_tokens()
    pieces = cut_between_layers(own_backwards(), 2, (tokens,))
    stage = pieces.get_stage_module(1)
    with pytest.raises(StageError, match=r"given the inputs nothing. Expected tokens="):
        stage(torch.zeros(1))
    with pytest.raises(StageError, match=r"1 values from earlier stages"):
        stage(tokens=tokens)
    with pytest.raises(PipeliningShapeError, match=r"input tokens"):
        pieces(tokens[:1])
