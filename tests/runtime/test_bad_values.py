"""Losses and gradients that are not finite: where they began, and steps that are skipped."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline, PipelineStage
from penstock.errors import BadValueError, StageError

WIDTH, NUM_MICROBATCHES = 4, 4


class NanBackward(torch.autograd.Function):
    """An identity whose gradient is NaN for inputs that begin with a 7."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_bad = x.flatten()[0].item() == 7
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan if ctx.is_bad else grad


class Spoilt(nn.Module):
    """A module whose backward gives NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return NanBackward.apply(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def run_ranks(
    use: Callable[[Pipeline, Tensor, Tensor], Any],
    *,
    num_ranks: int = 2,
    schedule: str = "ZB-V",
    block: Callable[[int], nn.Module] = lambda number: Block(),
    **options: Any,
) -> list[Any]:
    """Return what `use` returns on each rank, for a pipeline of a block per stage, and a batch."""

    def main(group: Any) -> Any:
        torch.manual_seed(0)
        made = penstock.schedules.get(schedule)(
            num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES
        )
        num_stages = made.placement.num_stages
        blocks = [block(number) for number in range(num_stages)]
        x, target = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH)
        held = made.placement.stages_of(group.rank)
        stages = [
            PipelineStage(blocks[stage], stage, num_stages, "cpu", group=group) for stage in held
        ]
        with_loss = {"loss_fn": nn.functional.mse_loss, **options}
        return use(Pipeline(stages, made, **with_loss), x, target)

    return penstock.local_ranks(num_ranks, main)


def grads_of(pipe: Pipeline) -> dict[str, Tensor | None]:
    return {
        f"{index}.{name}": None if parameter.grad is None else parameter.grad.clone()
        for index, stage in pipe.stages.items()
        for name, parameter in stage.submod.named_parameters()
    }


def step(pipe: Pipeline, x: Tensor, target: Tensor, **options: Any) -> Any:
    pipe.step(*((x,) if 0 in pipe.stages else ()), target=target, **options)
    return pipe.bad_value


def spoil_batch(x: Tensor, value: float = math.nan, mb: int = 2) -> Tensor:
    """Return the batch with one bad value, in a microbatch."""
    x = x.clone()
    x[2 * mb, 1] = value
    return x


def set_weight(pipe: Pipeline, stage: int, value: float) -> None:
    if stage in pipe.stages:
        pipe.stages[stage].submod.mlp[2].weight.data[1, 1] = value  # type: ignore[union-attr,index]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V", "ZB-H1", "DualPipeV"])
def test_steps_that_are_fine_have_the_same_bits(schedule: str) -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        losses: list[Tensor] = []
        for scale in (1, 2):
            assert step(pipe, x * scale, target, losses=losses) is None
        return grads_of(pipe), losses

    plain = run_ranks(use, schedule=schedule)
    for mode in ("report", "skip", "raise"):
        watched = run_ranks(use, schedule=schedule, bad_values=mode)
        for (expected, losses), (actual, same_losses) in zip(plain, watched, strict=True):
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[name], actual[name]) for name in expected)
            assert all(map(torch.equal, losses, same_losses))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_input_is_named_with_its_microbatch(num_ranks: int, value: float) -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        assert step(pipe, x, target) is None
        return str(step(pipe, spoil_batch(x, value), target))

    (text,) = set(run_ranks(use, num_ranks=num_ranks, bad_values="report"))
    assert text == (
        f"the loss of step 2 is not finite: {value} appeared first in the forward of stage 0 "
        "(rank 0), microbatch 2, its inputs"
    )


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V", "ZB-H1"])
def test_infinite_weight_is_named_by_its_module(schedule: str) -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        set_weight(pipe, 1, math.inf)
        return step(pipe, x, target)

    for bad in run_ranks(use, schedule=schedule, bad_values="report"):
        assert (1, 1, 0, "module mlp.2") == (bad.stage, bad.rank, bad.mb, bad.place)
        assert bad.is_loss
        assert not bad.is_skipped


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1", "ZB-V"])
def test_bad_backward_is_named_by_its_module_and_microbatch(schedule: str) -> None:
    class Chain(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.spoilt = Spoilt()
            self.is_spoilt, self.num_calls = number == 1, 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            if self.is_spoilt and self.num_calls == 2:
                x = torch.cat([torch.full_like(x[:1], 7.0), x[1:]])
            self.num_calls += 1
            return self.after(self.spoilt(x))

    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        return step(pipe, x, target)

    for bad in run_ranks(use, schedule=schedule, block=Chain, bad_values="report"):
        assert str(bad) == (
            "a gradient of step 1 is not finite: nan appeared first in the backward of stage 1 "
            "(rank 1), microbatch 2, module spoilt"
        )


def test_bad_backward_of_the_loss_is_named() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - output.detach()).abs().sqrt().mean()  # 0, with an infinite slope.

    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        return step(pipe, x, target)

    for bad in run_ranks(use, loss_fn=loss_fn, bad_values="report"):
        assert ("the gradients of its outputs", 3, 0) == (bad.place, bad.stage, bad.mb)
        assert not bad.is_loss


def test_infinite_loss_is_named() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return output.mean() / 0

    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        return step(pipe, x, target)

    for bad in run_ranks(use, loss_fn=loss_fn, bad_values="report"):
        assert ("loss_fn", 3, 0) == (bad.place, bad.stage, bad.mb)
        assert bad.is_loss


def test_skipped_step_leaves_gradients_as_they_were() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        bad = step(pipe, spoil_batch(x), target)
        assert bad.is_skipped
        assert {None} == set(grads_of(pipe).values())
        assert step(pipe, x, target) is None
        before = grads_of(pipe)
        assert step(pipe, spoil_batch(x), target).is_skipped
        after = grads_of(pipe)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert 0 < pipe.clip_grad_norm_(1.0) < math.inf
        return before

    plain = run_ranks(lambda pipe, x, target: (step(pipe, x, target), grads_of(pipe))[1])
    for expected, actual in zip(plain, run_ranks(use, bad_values="skip"), strict=True):
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_accumulated_step_is_skipped_as_a_whole() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        assert step(pipe, spoil_batch(x), target, finalize=False) is None
        bad = step(pipe, x, target)
        assert {None} == set(grads_of(pipe).values())
        return bad.is_skipped, bad.is_loss, bad.step, bad.mb

    assert {(True, True, 2, 2)} == set(run_ranks(use, bad_values="skip"))


def test_bad_value_is_that_of_the_last_step_alone() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        assert step(pipe, spoil_batch(x), target) is not None
        return step(pipe, x, target, finalize=False)

    assert [None, None] == run_ranks(use, bad_values="skip")


class Prompted(Block):
    """Gives a parameter to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mlp(self.prompt)


def test_parameters_that_modules_take_keep_no_hooks() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        step(pipe, x, target)
        prompts = [stage.submod.get_parameter("prompt") for stage in pipe.stages.values()]
        return [len(prompt._backward_hooks or ()) for prompt in prompts]

    assert [[0, 0]] * 2 == run_ranks(use, block=lambda number: Prompted(), bad_values="report")


def test_bad_step_raises_on_all_ranks_and_the_pipeline_goes_on() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        with pytest.raises(BadValueError) as caught:
            step(pipe, spoil_batch(x), target)
        for stage in pipe.stages.values():
            stage.submod.zero_grad()
        assert step(pipe, x, target) is None
        return str(caught.value)

    for rank, text in enumerate(run_ranks(use, bad_values="raise")):
        assert text == (
            f"rank {rank}: the loss of step 1 is not finite: nan appeared first in the forward of "
            "stage 0 (rank 0), microbatch 2, its inputs. Expected finite ones: look at what this "
            "part was given, lower the learning rate, or skip such steps with bad_values='skip'."
        )


def test_bad_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        set_weight(pipe, 1, math.nan)
        step(pipe, x, target)

    with caplog.at_level(logging.WARNING, logger="penstock"):
        run_ranks(use, bad_values="skip")
    (message,) = caplog.messages
    assert message == (
        "the loss of step 1 is not finite: nan appeared first in the forward of stage 1 (rank 1), "
        "microbatch 0, module mlp.2; the step is skipped"
    )


def test_infinite_values_that_do_no_harm_are_not_blamed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.layer = nn.Identity(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            mask = self.mask(torch.tensor([0.0, -math.inf, 0.0, 0.0]))
            return self.layer(x) * torch.softmax(mask, 0)

    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        assert step(pipe, x, target) is None
        for stage in pipe.stages.values():
            if stage.is_last:
                stage.submod.layer.weight.data[0, 0] = math.inf  # type: ignore[union-attr]
        return step(pipe, x, target).place

    assert {"module layer"} == set(
        run_ranks(use, schedule="1F1B", block=lambda n: Masked(), bad_values="report")
    )


def test_microbatch_without_values_is_not_bad() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        labels = torch.zeros(len(x), dtype=torch.int64)
        labels[:2] = -100
        return step(pipe, x, labels)

    found = run_ranks(
        use,
        loss_fn=nn.functional.cross_entropy,
        loss_weight=lambda target: (target != -100).sum(),
        bad_values="raise",
    )
    assert [None, None] == found


def test_microbatches_are_named_as_they_were_given() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        return step(pipe, spoil_batch(x, mb=3), target, work=[1, 2, 3, 4]).mb

    assert {3} == set(run_ranks(use, by_work=True, bad_values="report"))


def test_bad_value_in_an_evaluation_is_not_looked_for() -> None:
    def use(pipe: Pipeline, x: Tensor, target: Tensor) -> Any:
        pipe.eval(*((spoil_batch(x),) if 0 in pipe.stages else ()), target=target)
        return pipe.bad_value

    assert [None, None] == run_ranks(use, bad_values="raise")


def test_wrong_bad_values_are_refused() -> None:
    with pytest.raises(StageError, match=r"bad_values is 'stop'\. Expected 'report', 'skip' or"):
        run_ranks(lambda *_: None, bad_values="stop")
    with pytest.raises(StageError, match="bad_values is 'skip', but there is no loss_fn, and"):
        run_ranks(lambda *_: None, bad_values="skip", loss_fn=None)
    with pytest.raises(StageError, match="bad_values is 'skip', but on_grads_ready is given"):
        run_ranks(lambda *_: None, bad_values="skip", on_grads_ready=print)
