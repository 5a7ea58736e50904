"""Forwards that run twice in pipelines of many kinds: tied, with skips, compiled, drop-in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import rotated
from local_steps import FOUR_STAGES, WIDTH, grads_of, mean_square, mlp, mlp_batch, run_locally
from penstock import LocalGroup, Pipeline, PipelineStageInfo, Schedule, local_ranks
from penstock.compat.schedules import _PipelineScheduleRuntime
from penstock.errors import ScheduleError
from penstock.ir import Recompute
from recomputed_steps import assert_same_bits, recomputed
from skip_models import Skip, SkipRun, train_skips
from stage_training import make_stages
from tied_models import grads_by_name, make_tied_pipeline, tied_batch, tied_stage

KINDS = ["all", "some", "early"]


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_skips_give_the_same(schedule: Schedule, kind: str) -> None:
    skips = (Skip(0, 2, "two"), Skip(0, 3, "integers"), Skip(1, 3, "nested"))
    expected, actual = (
        local_ranks(one.num_ranks, train_skips, SkipRun(one, skips))
        for one in (schedule, recomputed(schedule)[kind])
    )
    for wanted, found in zip(expected, actual, strict=True):
        assert_same_bits([vars(each) for each in wanted], [vars(each) for each in found])


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_tied_parameters_give_the_same(schedule: Schedule, kind: str) -> None:
    tokens, target = tied_batch(2 * schedule.num_microbatches, 0)

    def main(group: LocalGroup, one: Schedule) -> Any:
        held = one.placement.stages_of(group.rank)
        own = {index: tied_stage(index, one.num_stages) for index in held}
        pipeline = make_tied_pipeline(group, one, own)
        for _ in range(2):
            pipeline.step(tokens, target=target)
        return grads_by_name(own)

    assert_same_bits(
        local_ranks(schedule.num_ranks, main, schedule),
        local_ranks(schedule.num_ranks, main, recomputed(schedule)[kind]),
    )


class Compiled(nn.Module):
    """A stage of which the middle is compiled; it changes buffers."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        if backend == "penstock":
            self.middle = penstock.compile(middle)
        else:
            middle.compile(backend=backend)
            self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.middle(self.first(x))
        return x + y


@pytest.mark.filterwarnings("ignore:.*was compiled by torch.compile, whose backward cannot be")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of itself.
@rotated(
    parts=[None, ["middle"], ["first", "middle"]],
    how=[
        ("aot_eager", "1F1B"),
        ("aot_eager", "ZB-H1"),
        ("inductor", "DualPipeV"),
        ("penstock", "ZB-V"),
    ],
)
def test_compiled_stages_give_the_same(how: tuple[str, str], parts: list[str] | None) -> None:
    backend, name = how
    """The inputs of the second stage need gradients, so its compiled backward can be split."""
    schedule, batch, found = FOUR_STAGES[name], mlp_batch(), []
    for each in (schedule, recomputed(schedule)["all"]):
        torch.compiler.reset()
        torch.manual_seed(0)
        modules: list[nn.Module] = [Compiled(backend).double() for _ in range(schedule.num_stages)]

        def main(pipeline: Pipeline) -> None:
            for _ in range(2):
                pipeline.step(batch.args[0], target=batch.target)

        run_locally(modules, each, main, stage_options={"recomputed": parts})
        found.append([grads_of(modules), [*modules[1].buffers()]])
    assert_same_bits(*found)


def test_drop_in_classes_refuse_files_that_recompute(tmp_path: Path) -> None:
    """Their actions are torch's, which has no such one."""
    file = tmp_path / "order.csv"
    file.write_text(recomputed(FOUR_STAGES["ZB-V"])["all"].to_csv())

    def main(group: LocalGroup) -> None:
        held = FOUR_STAGES["ZB-V"].placement.stages_of(group.rank)
        runtime = _PipelineScheduleRuntime(make_stages(group, mlp(), held), 4, loss_fn=mean_square)
        with pytest.raises(ScheduleError, match=r"'R' is not a type of action\. Expected one of"):
            runtime._load_csv(str(file), format="compute_only")

    local_ranks(2, main)


def test_hooks_and_contexts_are_called_for_both_forwards() -> None:
    modules, batch = mlp(1), mlp_batch()
    seen: list[str] = []

    @contextmanager
    def context(info: PipelineStageInfo) -> Iterator[None]:
        seen.append(f"context {info.microbatch_index}")
        yield

    def hook(module: nn.Module, args: Any, outputs: Any) -> None:
        seen.append("hook")

    def before(action: Any, step: Any) -> None:
        seen.append(str(action))
        step.run(action)

    def main(pipeline: Pipeline) -> None:
        pipeline.stages[0].register_forward_context(context)
        pipeline.register_custom_function(Recompute, before)
        pipeline.step(batch.args[0], target=batch.target)

    modules[0].register_forward_hook(hook)
    run_locally(modules, Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n"), main)
    first = ["context 0", "hook", "context 1", "hook"]
    assert [*first, "0R0", "context 0", "hook", "0R1", "context 1", "hook"] == seen
