"""What may not change between steps, and what cannot be sent at all."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from failing_steps import (
    AS_BEFORE,
    Layer,
    errors_of,
    mse_loss,
    pipeline_of,
    train,
)
from split_model import CPU
from torch import Tensor, nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.errors import CommError, PipeliningShapeError, StageError

CHANGES: dict[str, tuple[Callable[[Tensor, int], Any], str]] = {
    "shape": (
        lambda y, call: y if call <= 4 else y[:1],
        "stage 0, microbatch 0: output 0: shape mismatch: expected (2, 4), got (1, 4). "
        + AS_BEFORE,
    ),
    "shape of a later microbatch": (
        lambda y, call: y if call <= 5 else y[:, :0],
        "stage 0, microbatch 1: output 0: shape mismatch: expected (2, 4), got (2, 0). "
        + AS_BEFORE,
    ),
    "dtype": (
        lambda y, call: y if call <= 4 else y.double(),
        "stage 0, microbatch 0: output 0: dtype mismatch: expected torch.float32, got "
        f"torch.float64. {AS_BEFORE}",
    ),
    "number": (
        lambda y, call: (y, y) if call <= 4 else (y,),
        "stage 0, microbatch 0: output: structure mismatch: expected TreeSpec(tuple, None, [*,\n"
        "  *]), got TreeSpec(tuple, None, [*]). Let the stage return the same structure for every "
        "microbatch, or make the stages with dynamic_shapes=True.",
    ),
    "value": (
        lambda y, call: (y, "a" if call <= 4 else "b"),
        f"stage 0, microbatch 0: output 1: value mismatch: expected 'a' as in the first step, "
        f"got 'b'. {AS_BEFORE}",
    ),
    "tensor to value": (
        lambda y, call: (y, y.detach() if call <= 4 else None),
        "stage 0, microbatch 0: output 1: value mismatch: expected TensorForm(shape=torch.Size("
        f"[2, 4]), dtype=torch.float32, requires_grad=False) as in the first step, got None. "
        f"{AS_BEFORE}",
    ),
    "requires_grad": (
        lambda y, call: y if call <= 4 else y.detach(),
        "stage 0, microbatch 0: output 0: requires_grad mismatch: expected True as in the first "
        f"step, got False. {AS_BEFORE}",
    ),
}  # fmt: skip


def _change_in_the_third_step(
    change: Callable[[Tensor, int], Any], *, dynamic: bool
) -> Callable[[LocalGroup], int]:
    def main(group: LocalGroup) -> int:
        modules = [Layer(change), Layer()]
        kwargs = {"dynamic_shapes": dynamic}
        pipeline = pipeline_of(group, *modules, stage_kwargs=kwargs, loss_fn=lambda y, _: y.sum())
        for _ in range(3):
            train(pipeline)
        return modules[1].call

    return main


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=list(CHANGES))
def test_a_message_unlike_that_of_the_first_step_is_rejected_before_it_is_sent(
    change: Callable[[Tensor, int], Any], message: str
) -> None:
    calls: list[int] = []

    def main(group: LocalGroup) -> None:
        modules = [Layer(change), Layer(lambda y, call: (calls.append(call), y)[1])]
        pipeline = pipeline_of(group, *modules, loss_fn=lambda y, _: y.sum())
        for _ in range(3):
            train(pipeline)

    first, second = errors_of(2, main)
    assert isinstance(first, PipeliningShapeError)
    assert message == str(first)
    (mb,) = re.findall(r"microbatch (\d)", message)
    place = (
        f"in 0SEND_F{mb} (sending the activation of microbatch {mb} from stage 0 to stage 1), "
        "on rank 0"
    )
    assert [place] == first.__notes__
    assert isinstance(second, CommError)
    expected = (
        f"rank 1 stopped waiting for the activation of microbatch {mb} for stage 1 from stage 0 "
        f"on rank 0, because rank 0 failed: PipeliningShapeError: {message}, {place}"
    )
    assert expected == str(second)
    assert 4 + int(mb) == len(calls)


@pytest.mark.parametrize("name", list(CHANGES))
def test_with_dynamic_shapes_every_message_may_differ(name: str) -> None:
    change, _ = CHANGES[name]
    if name == "dtype":
        change = lambda y, call: (y, y.detach() if call <= 4 else y.detach().double())  # noqa: E731
    if name == "shape of a later microbatch":
        change = lambda y, call: y if call <= 5 else y[:0]  # noqa: E731
    assert [0, 6] == local_ranks(2, _change_in_the_third_step(change, dynamic=True))


def test_dynamic_shapes_of_one_stage_hold_for_all_ranks() -> None:
    def main(group: LocalGroup) -> None:
        is_dynamic = group.rank == 1
        stage = PipelineStage(Layer(), group.rank, 2, CPU, group=group, dynamic_shapes=is_dynamic)
        pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=mse_loss)
        for rows in (4, 8, 2):
            train(pipeline, rows)

    local_ranks(2, main)


def test_a_gradient_that_is_not_as_in_the_first_step_is_rejected() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.call += 1
            return x if self.call <= 2 else x + y

    def main(group: LocalGroup) -> None:
        pipeline = pipeline_of(group, Layer(lambda y, _: (y, 2 * y)), Uses())
        train(pipeline)
        train(pipeline)

    first, second = errors_of(2, main)
    assert isinstance(second, PipeliningShapeError)
    expected = (
        "stage 1, microbatch 0: input gradient 1: value mismatch: expected None as in the first"
    )
    assert str(second).startswith(expected)
    assert "on rank 1" in str(first)


def test_a_gradient_that_is_missing_after_the_first_step_is_zeros() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.call += 1
            return x + y if self.call <= 2 else x

    def main(group: LocalGroup) -> Tensor:
        torch.manual_seed(0)
        layer = Layer(lambda y, _: (y, 2 * y))
        pipeline = pipeline_of(group, layer, Uses(), loss_fn=lambda y, _: y.sum())
        for _ in range(2):
            layer.zero_grad()
            train(pipeline)
        return layer.linear.bias.grad

    assert [2, 2, 2, 2] == local_ranks(2, main)[0].tolist()


@pytest.mark.parametrize(
    ("value", "reason"),
    [(lambda: 0, "a builtins.function"), ((number for number in ()), "a builtins.generator")],
    ids=["function", "generator"],
)
def test_an_output_that_is_not_data_is_rejected(value: Any, reason: str) -> None:
    errors = errors_of(
        2, lambda group: train(pipeline_of(group, Layer(lambda y, _: (y, value)), Layer()))
    )
    assert isinstance(errors[0], StageError)
    begin = "stage 0, microbatch 0: output cannot be sent to rank 1: "
    end = (
        ". Expected tensors, and values that are data. Let the stage return only what the next "
        "one needs."
    )
    assert str(errors[0]).startswith(begin)
    assert str(errors[0]).endswith(end)
    assert reason in str(errors[0])
    assert errors[0].__cause__ is not None
    assert isinstance(errors[1], CommError)


class Counter(nn.Module):
    """Returns a buffer of its own beside its input, and changes it each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return x * 1, self.count


@pytest.mark.parametrize("is_eval", [False, True])
def test_buffer_that_the_stage_changes_arrives_as_it_was_on_the_same_rank(is_eval: bool) -> None:
    schedule = penstock.schedules.get("LoopedBFS")(
        num_ranks=1, num_microbatches=4, stages_per_rank=2
    )

    def main(group: penstock.LocalGroup) -> list[float]:
        modules = [Counter(), Second()]
        stages = [PipelineStage(m, i, 2, "cpu", group=group) for i, m in enumerate(modules)]
        pipeline = Pipeline(stages, schedule, loss_fn=lambda outputs, _: outputs.sum())
        x = torch.randn(4, 3, requires_grad=True)
        outputs = pipeline.eval(x) if is_eval else pipeline.step(x)
        return outputs.flatten().tolist()

    assert [[1.0, 2.0, 3.0, 4.0]] == penstock.local_ranks(1, main)


class Second(nn.Module):
    """Returns the second of its arguments, by way of the first."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return x.sum(1) * 0 + count


@dataclass
class Box:
    """An object that torch cannot look into."""

    value: Tensor


class Boxing(nn.Linear):
    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.value if isinstance(x, Box) else x))


def test_object_with_a_gradient_between_stages_of_one_rank_is_refused() -> None:
    """Its gradient got lost without a word where the stages of a V meet."""
    schedule = penstock.schedules.get("ZB-V")(num_ranks=1, num_microbatches=2)

    def main(group: penstock.LocalGroup) -> None:
        stages = [PipelineStage(Boxing(3, 3), index, 2, "cpu", group=group) for index in (0, 1)]
        pipeline = Pipeline(stages, schedule, loss_fn=lambda outputs, _: outputs.value.sum())
        pipeline.step(torch.randn(4, 3))

    with pytest.raises(StageError, match="stage 0, microbatch 0: output 0 is a Box with a tensor"):
        penstock.local_ranks(1, main)


class Shaped(nn.Linear):
    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, torch.Size]:
        return super().forward(x), x.shape


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shape_among_the_outputs_stays_a_shape(num_ranks: int) -> None:
    """It arrived as a tuple, and the second step was refused."""
    schedule = penstock.schedules.get("LoopedBFS")(
        num_ranks=num_ranks, num_microbatches=2, stages_per_rank=2 // num_ranks
    )
    seen = []

    def loss(outputs: Any, _: None) -> Tensor:
        seen.append(outputs[1])
        return outputs[0].sum()

    def main(group: penstock.LocalGroup) -> None:
        held = schedule.placement.stages_of(group.rank)
        stages = [PipelineStage(Shaped(3, 3), index, 2, "cpu", group=group) for index in held]
        pipeline = Pipeline(stages, schedule, loss_fn=loss)
        for _ in range(2):
            pipeline.step(torch.randn(4, 3))

    penstock.local_ranks(num_ranks, main)
    assert [torch.Size([2, 3])] * 4 == seen
