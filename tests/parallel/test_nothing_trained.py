"""A step in which nothing would be trained is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import StageError, StepError
from spread_models import loss_of, make_batch, make_decoder, on_cut_ranks, on_ranks, whole_step

Pipe = penstock.ParallelModel

REFUSED = "none of the losses of all 4 microbatches needs a gradient, so nothing would be trained"


def train(pipe: Pipe) -> Tensor:
    tokens, target = make_batch()
    loss: Tensor = pipe.step(tokens, target=target)
    return loss


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_model_that_is_all_frozen_is_refused(schedule: str) -> None:
    """Such a step once gave a loss on every rank, and no gradients."""
    with pytest.raises(StageError, match=REFUSED):
        on_cut_ranks(2, train, make_decoder().requires_grad_(False), schedule=schedule)


class Ending(nn.Module):
    """A decoder whose outputs need no gradient."""

    def __init__(self, *, gives_numbers: bool) -> None:
        super().__init__()
        self.decoder = make_decoder()
        self.gives_numbers = gives_numbers

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(tokens)
        return logits.argmax(-1) if self.gives_numbers else logits.detach()


@pytest.mark.parametrize("gives_numbers", [True, False], ids=["whole numbers", "detached"])
def test_outputs_that_need_no_gradient_are_refused(gives_numbers: bool) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.double().mean()

    with pytest.raises(StageError, match=REFUSED):
        on_ranks(2, train, Ending(gives_numbers=gives_numbers), loss_fn=loss_fn)


def test_one_trained_parameter_of_one_rank_is_enough() -> None:
    model = make_decoder(is_tied=False).requires_grad_(False)
    model.embedding.requires_grad_(True)  # On rank 0, as the last stage is, and far from it.

    def run(pipe: Pipe) -> set[str]:
        train(pipe)
        return {name for name, weight in pipe.named_parameters() if weight.grad is not None}

    assert [{"embedding.weight"}, set()] == on_cut_ranks(2, run, model)


def test_microbatches_that_train_nothing_are_left_to_the_others() -> None:
    """A forward may skip all that is trained, as stochastic depth does."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))
            self.layers[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            return self.layers[1](x) if x.sum() > 0 else x

    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(8, 4, dtype=torch.float64)
    with torch.no_grad():
        are_trained = [bool(model.layers[0](part).sum() > 0) for part in x.chunk(4)]
    assert {True, False} == set(are_trained)

    def main(group: penstock.LocalGroup) -> None:
        stage = penstock.PipelineStage(model, 0, 1, "cpu", group=group)
        options: dict[str, Any] = {"loss_fn": lambda output, target: output.square().mean()}
        penstock.Pipeline(stage, "1F1B", num_microbatches=4, **options).step(x)

    penstock.local_ranks(1, main)
    grad = model.layers[1].weight.grad
    assert grad is not None
    found, model.layers[1].weight.grad = grad.clone(), None
    for part, is_trained in zip(x.chunk(4), are_trained, strict=True):
        if is_trained:
            (model(part).square().mean() / 4).backward()
    torch.testing.assert_close(found, model.layers[1].weight.grad, rtol=0, atol=1e-15)


def test_schedule_without_a_backward_evaluates_and_does_not_train() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> float:
        with pytest.raises(StepError, match="with a schedule that has no backward, so there is"):
            pipe.step(tokens, target=target)
        loss: float = pipe.evaluate(tokens, target=target).item()
        return loss

    expected = whole_step(make_decoder(), tokens, target)
    found = on_cut_ranks(2, run, make_decoder(), schedule="ForwardOnly")
    assert [expected] * 2 == pytest.approx(found, rel=1e-13)


def test_schedule_of_torchs_names_runs_a_frozen_model_as_torch_does() -> None:
    tokens, target = make_batch()
    model = make_decoder().requires_grad_(False)

    def main(group: Any) -> list[float]:
        stage = penstock.PipelineStage(model, 0, 1, "cpu", group=group)
        losses: list[Tensor] = []
        schedule = penstock.ScheduleGPipe(stage, 4, loss_fn=loss_of)
        schedule.step(tokens, target=target, losses=losses)
        return [loss.item() for loss in losses]

    parts = zip(tokens.chunk(4), target.chunk(4), strict=True)
    expected = [loss_of(model(part), wanted).item() for part, wanted in parts]
    assert [expected] == penstock.local_ranks(1, main)
