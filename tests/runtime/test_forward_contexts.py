"""Contexts around the forwards of a stage."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from local_steps import mean_square, randn
from penstock import LocalGroup, Pipeline, PipelineStage, PipelineStageInfo, local_ranks
from penstock.errors import StageError, StepError

WIDTH, M = 4, 3
SCHEDULES = ["1F1B", "ZB-H1"]


class Watched(nn.Module):
    """A checkpointed layer that notes which context it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.inside: list[PipelineStageInfo] = []
        self.seen: list[PipelineStageInfo | None] = []

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.seen.append(self.inside[-1] if self.inside else None)
            return torch.tanh(self.layer(x))

        result: Tensor = checkpoint(run, x, use_reentrant=False)
        return result

    @contextmanager
    def context(self, info: PipelineStageInfo) -> Iterator[None]:
        self.inside.append(info)
        try:
            yield
        finally:
            self.inside.pop()


def run(schedule: str, main: Any) -> list[Any]:
    def on_rank(group: LocalGroup) -> Any:
        torch.manual_seed(group.rank)
        stage = PipelineStage(Watched(), group.rank, 2, "cpu", group=group)
        pipeline = Pipeline(stage, schedule, num_microbatches=M, loss_fn=mean_square)
        return main(stage, pipeline)

    return local_ranks(2, on_rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_forward_runs_inside_and_what_is_computed_again_does_not(schedule: str) -> None:
    x, target = randn(6, WIDTH), randn(6, WIDTH)

    def main(stage: PipelineStage, pipeline: Pipeline) -> None:
        module = stage.submod
        handle = stage.register_forward_context(module.context)
        pipeline.step(x, target=target)
        inside = [
            PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=mb) for mb in range(M)
        ]
        assert inside == [info for info in module.seen if info is not None]
        assert M == module.seen.count(None)  # In backwards.
        assert not any(info.is_metadata_inference for info in inside)
        module.seen.clear()
        pipeline.eval(x)
        assert inside == module.seen
        handle.remove()
        module.seen.clear()
        pipeline.eval(x)
        assert [None] * M == module.seen

    run(schedule, main)


def test_one_context_at_a_time() -> None:
    def main(stage: PipelineStage, pipeline: Pipeline) -> None:
        handle = stage.register_forward_context(stage.submod.context)
        with pytest.raises(RuntimeError, match=r"already has a forward context\. There can be one"):
            stage.register_forward_context(stage.submod.context)
        handle.remove()
        stage.register_forward_context(stage.submod.context)

    run("1F1B", main)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_context_that_hides_an_exception_is_refused(schedule: str) -> None:
    def main(stage: PipelineStage, pipeline: Pipeline) -> None:
        if stage.stage_index == 0:
            stage.register_forward_context(lambda info: suppress(Exception))
        pipeline.step(randn(6, WIDTH + 1), target=randn(6, WIDTH))

    with pytest.raises(StepError, match="stage 0, microbatch 0: the forward context hid an"):
        run(schedule, main)


def test_context_that_cannot_be_made_is_refused() -> None:
    def main(group: LocalGroup) -> None:
        stage = PipelineStage(Watched(), 0, 1, "cpu", group=group)
        with pytest.raises(StageError, match=r"the forward context of stage 0 is None\. Expected"):
            stage.register_forward_context(None)

    local_ranks(1, main)


def make_trio(group: LocalGroup, schedule: str, modules: list[nn.Module]) -> Any:
    stage = PipelineStage(modules[group.rank], group.rank, 3, "cpu", group=group)
    return stage, Pipeline(stage, schedule, num_microbatches=M, loss_fn=mean_square)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_context_without_gradients_is_refused_in_training(
    schedule: str, mode: Any, place: int
) -> None:
    # On the last stage, a step left all gradients out without a word.
    x, target = randn(6, WIDTH), randn(6, WIDTH)
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    modules[1].requires_grad_(False)  # The gradient of its input would be missing all the same.

    def main(group: LocalGroup) -> None:
        stage, pipeline = make_trio(group, schedule, modules)
        if group.rank == place:
            stage.register_forward_context(lambda info: mode())
        outputs = pipeline.eval(x)
        if outputs is not None:  # On some processors, a larger batch rounds differently.
            whole = nn.Sequential(*modules)
            assert torch.equal(torch.cat([whole(part) for part in x.tensor_split(M)]), outputs)
        pipeline.step(x, target=target)

    message = (
        rf"stage {place}, microbatch 0: the forward context turns on torch\.{mode.__name__}\(\) in "
        r"a training step, so the gradients .* would be missing\. Expected .*\. Enter it in eval\("
    )
    with pytest.raises(StageError, match=message) as caught:
        local_ranks(3, main)
    assert any(f"on rank {place}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_context_without_gradients_is_allowed_where_there_are_none(
    schedule: str, mode: Any
) -> None:
    x, target = randn(6, WIDTH), randn(6, WIDTH)
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    modules[0].requires_grad_(False)
    whole = copy.deepcopy(nn.Sequential(*modules))
    for part, wanted in zip(x.chunk(M), target.chunk(M), strict=True):
        (mean_square(whole(part), wanted) / M).backward()

    def main(group: LocalGroup) -> None:
        stage, pipeline = make_trio(group, schedule, modules)
        if group.rank == 0:
            stage.register_forward_context(lambda info: mode())
        pipeline.step(x, target=target)

    local_ranks(3, main)
    for expected, actual in zip(
        whole.parameters(), nn.Sequential(*modules).parameters(), strict=True
    ):
        torch.testing.assert_close(expected.grad, actual.grad)
