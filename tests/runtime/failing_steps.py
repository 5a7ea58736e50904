"""What the tests of errors share: a layer that misbehaves, and what each rank raises."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_model import CPU, make_schedule, make_stages
from torch import Tensor, nn

from penstock import (
    LocalGroup,
    Pipeline,
    PipelineStage,
    local_ranks,
)

mse_loss = nn.functional.mse_loss
AS_BEFORE = "Keep it the same in all steps, or make the stages with dynamic_shapes=True."
LIKE_EXAMPLES = "Give the stage examples like its tensors, or none."


class Layer(nn.Module):
    """A linear layer; `change(y, call)` may make something else of what it returns."""

    def __init__(self, change: Callable[[Any, int], Any] | None = None, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.change = change
        self.call = 0

    def forward(self, x: Any, *rest: Any) -> Any:
        y = self.linear(x)
        self.call += 1
        return y if self.change is None else self.change(y, self.call)


class Boom(Exception):
    """What a user's module raises."""


def alone(**kwargs: Any) -> Callable[[LocalGroup], PipelineStage]:
    return lambda group: PipelineStage(nn.Linear(4, 4), 0, 1, CPU, group=group, **kwargs)


def pipeline_of(
    group: LocalGroup,
    *modules: nn.Module,
    schedule: str = "1F1B",
    m: int = 2,
    stage_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Pipeline:
    made = make_schedule(schedule, len(modules), m)
    stages = make_stages(group, made, modules, **(stage_kwargs or {}))
    return Pipeline(stages, made, **({"loss_fn": mse_loss} | kwargs))


def train(pipeline: Pipeline, rows: int = 4, **kwargs: Any) -> Any:
    return pipeline.step(torch.ones(rows, 4), target=torch.ones(rows, 4), **kwargs)


def errors_of(num_ranks: int, main: Callable[[LocalGroup], Any]) -> list[BaseException]:
    """What each rank raises."""
    errors: dict[int, BaseException] = {}

    def catching(group: LocalGroup) -> None:
        try:
            main(group)
        except BaseException as error:
            errors[group.rank] = error
            raise

    with pytest.raises(BaseException):  # noqa: B017, PT011  # Whatever it is, it is checked by rank.
        local_ranks(num_ranks, catching)
    return [errors[rank] for rank in range(num_ranks)]


def assert_rejected(
    kind: type[Exception], message: str, main: Callable[[LocalGroup], Any], num_ranks: int = 1
) -> None:
    with pytest.raises(kind) as caught:
        local_ranks(num_ranks, main)
    assert message == str(caught.value)


def raise_at(call: int) -> Callable[[Tensor, int], Tensor]:
    def change(y: Tensor, number: int) -> Tensor:
        if number == call:
            raise Boom(f"call {number}")
        return y

    return change
