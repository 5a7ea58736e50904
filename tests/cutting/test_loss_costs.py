"""The loss counts with the last layer: its time, what it holds, and what its backward needs."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Balanced, LayerCost
from penstock.cutting import CutModel, count_loss, cut_between_layers
from penstock.errors import CostError

WIDTH, CLASSES, ROWS = 8, 50, 4
X = torch.ones(ROWS, WIDTH)
TARGET = torch.zeros(ROWS, dtype=torch.long)
LOGITS_BYTES = ROWS * CLASSES * 4
COUNTS: list[Callable[..., list[LayerCost]]] = [
    penstock.count_layers,
    lambda *args, **options: penstock.measure_layers(*args, repeats=1, **options),
]


class Net(nn.Module):
    """Equal layers, and a head with many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.head = nn.ModuleList([nn.Linear(WIDTH, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head[0](x)


CHAIN = ["layers", "head"]


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    """A function whose target nobody can guess."""
    return functional.cross_entropy(output, target)


@pytest.mark.parametrize("count", COUNTS, ids=["counted", "measured"])
@pytest.mark.parametrize("layers", [None, CHAIN], ids=["traced", "chain"])
def test_last_layer_has_the_memory_of_the_loss(count: Any, layers: list[str] | None) -> None:
    """Log-probabilities are held; their gradients and those of the logits come and go."""
    plain = count(Net(), (X,), layers=layers)
    costs = count(Net(), (X,), layers=layers, loss_fn=own_loss, target=TARGET)
    assert [cost.name for cost in plain] == [cost.name for cost in costs]
    held = costs[-1].activation_bytes - plain[-1].activation_bytes
    assert LOGITS_BYTES <= held <= LOGITS_BYTES + 8
    assert 2 * LOGITS_BYTES <= costs[-1].backward_bytes <= 2 * LOGITS_BYTES + 8
    assert {0.0} == {cost.backward_bytes for cost in (*plain, *costs[:-1])}


@pytest.mark.parametrize("layers", [None, CHAIN], ids=["traced", "chain"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counted_time_of_the_loss_is_that_of_the_last_layer(
    layers: list[str] | None, device: str
) -> None:
    with torch.device(device):
        model, x = Net(), X.to(device)
    plain = penstock.count_layers(model, (x,), layers=layers)
    costs = penstock.count_layers(model, (x,), layers=layers, loss_fn=own_loss, target=TARGET)
    loss = count_loss(model, own_loss, (x,), target=TARGET)
    assert loss.time > plain[0].time
    assert plain[-1].time + loss.time == costs[-1].time
    assert plain[:-1] == costs[:-1]


def test_measured_time_of_the_loss_is_that_of_the_last_layer() -> None:
    """The loss takes longer than all layers together, however busy the machine is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 100_000))
    slow = partial(functional.cross_entropy, label_smoothing=0.1)

    def long_loss(output: Tensor, target: Tensor) -> Tensor:
        return sum((slow(output * k, target) for k in range(30)), torch.zeros(()))

    args = (torch.ones(8, 4),)
    plain = penstock.measure_layers(model, args)
    costs = penstock.measure_layers(
        model, args, loss_fn=long_loss, target=torch.zeros(8, dtype=torch.long)
    )
    assert costs[1].time > 2 * plain[1].time


@pytest.mark.parametrize("count", COUNTS, ids=["counted", "measured"])
def test_parameters_of_a_loss_and_outputs_get_no_gradients(count: Any) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(output * self.scale, target)

    loss_fn, model = Learned(), Net()
    count(model, (X,), loss_fn=loss_fn, target=TARGET)
    assert {None} == {p.grad for p in (*loss_fn.parameters(), *model.parameters())}


IMAGE = torch.zeros(2, 5, 3, 3)
FORMS: list[tuple[Any, Tensor, Tensor]] = [
    (functional.cross_entropy, torch.zeros(4, 5), torch.zeros(4, dtype=torch.long)),
    (nn.CrossEntropyLoss(), IMAGE, torch.zeros(2, 3, 3, dtype=torch.long)),
    (partial(functional.cross_entropy, label_smoothing=0.1), IMAGE, torch.zeros(2, 3, 3).long()),
    (nn.NLLLoss(), torch.zeros(5), torch.zeros((), dtype=torch.long)),
    (functional.mse_loss, IMAGE, IMAGE),
    (nn.BCEWithLogitsLoss(), torch.zeros(4), torch.zeros(4)),
]


@pytest.mark.parametrize(("loss_fn", "output", "target"), FORMS)
def test_target_of_torchs_losses_follows_from_the_output(
    loss_fn: Any, output: Tensor, target: Tensor
) -> None:
    model = nn.Sequential(nn.Identity())
    given = count_loss(model, loss_fn, (output,), target=target)
    assert given == count_loss(model, loss_fn, (output,))
    assert given.backward_bytes > 0


@pytest.mark.parametrize("count", COUNTS, ids=["counted", "measured"])
def test_target_follows_from_an_output_that_has_a_history(count: Any) -> None:
    (cost,) = count(nn.Sequential(nn.Linear(WIDTH, WIDTH)), (X,), loss_fn=functional.l1_loss)
    assert cost.backward_bytes >= X.nbytes


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x * 2, "unused": x + 1}


def test_loss_may_take_the_output_apart() -> None:
    def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(output["logits"], target)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Named())
    for count in COUNTS:
        plain = count(model, (X,))
        costs = count(model, (X,), loss_fn=loss_fn, target=X)
        assert costs[-1].activation_bytes > plain[-1].activation_bytes


@pytest.mark.parametrize("count", COUNTS, ids=["counted", "measured"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"loss_fn": own_loss},
            "the target of loss_fn, which is own_loss, is not known: only for losses of torch does "
            "it follow from the output, if that is a tensor. Give the target: that of one "
            "microbatch, and to a plan that of the whole batch.",
        ),
        ({"target": TARGET}, "target was given without loss_fn, and nothing is computed from it"),
        ({"loss_fn": "model"}, "loss_fn is 'model'. Expected a function of the output and the tar"),
    ],
)
def test_loss_that_cannot_be_counted_is_refused(
    count: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(CostError, match=text):
        count(Net(), (X,), **options)


# Balanced cuts.

WAYS: dict[str, Callable[[nn.Module, Balanced], CutModel]] = {
    "traced": lambda model, policy: penstock.cut(model, (X,), split_policy=policy),
    "modules": lambda model, policy: penstock.cut_between_modules(
        model, policy, layers=CHAIN, mb_args=(X,)
    ),
    "layers": lambda model, policy: cut_between_layers(model, policy, (X,)),
}


def layers_of_the_last_stage(pieces: CutModel) -> int:
    names = dict(pieces.get_stage_module(1).named_parameters())
    return sum(name.startswith("layers.") and name.endswith(".bias") for name in names)


@pytest.mark.parametrize("way", WAYS)
def test_stage_with_the_loss_has_fewer_layers(way: str) -> None:
    found = {
        name: layers_of_the_last_stage(WAYS[way](Net(), Balanced(2, **options)))
        for name, options in {
            "no loss": {},
            "torch's": {"loss_fn": functional.cross_entropy},
            "own": {"loss_fn": own_loss, "target": TARGET},
            "known": {"loss": count_loss(Net(), own_loss, (X,), target=TARGET)},
        }.items()
    }
    assert found["torch's"] == found["own"] == found["known"] < found["no loss"]


@pytest.mark.parametrize("way", WAYS)
def test_log_says_that_a_loss_is_not_counted(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    plain = layers_of_the_last_stage(WAYS[way](Net(), Balanced(2)))
    assert "does not count the loss" not in caplog.text
    assert plain == layers_of_the_last_stage(WAYS[way](Net(), Balanced(2, loss_fn=own_loss)))
    assert "does not count the loss: its target does not follow from the output" in caplog.text


def test_log_has_the_error_of_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no such class")

    WAYS["traced"](Net(), Balanced(2, loss_fn=fails, target=TARGET))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "does not count the loss: RuntimeError('no such class')" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"costs": [1.0], "loss_fn": own_loss}, "costs and loss_fn were both given"),
        ({"costs": [1.0], "loss": LayerCost("loss", 1.0, 0, 0)}, "costs and loss were both given"),
        ({"loss": LayerCost("loss", 1.0, 0, 0), "loss_fn": own_loss}, "each says what the loss"),
        ({"target": TARGET}, "target was given without loss_fn"),
    ],
)
def test_policy_refuses_a_loss_that_would_not_count(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CostError, match=text):
        Balanced(2, **options)


def test_memory_cap_leaves_room_for_the_backward_of_the_loss() -> None:
    """It runs for one microbatch at a time, so it counts once however many are in flight."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers = [LayerCost(str(i), 1.0, 0.0, 10.0) for i in range(3)]
    for backward_bytes, expected in ((0.0, ["2", "3"]), (15.0, ["3"])):
        costs = [*layers, LayerCost("3", 1.0, 0.0, 10.0, backward_bytes)]
        policy = Balanced(2, costs=costs, memory=30.0, in_flight=[1, 1])
        pieces = penstock.cut(model, (X,), split_policy=policy)
        assert expected == list(dict(pieces.get_stage_module(1).named_children()))
