"""Trains a model of `staged_models` in a pipeline, and compares it with the same model unsplit.

`train` is what each rank runs: with `penstock.local_ranks` in one process, or in a worker of
`worker_pool`. Both take the same function, and give the same records.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from fuzzing import IS_LONG
from limits import HANG_S
from penstock import LocalGroup, Pipeline, PipelineStage, compat, schedules
from penstock.schedules import Shape
from staged_models import (
    MODELS,
    Model,
    StepRecord,
    make_optimizer,
    named_grads,
    train_unsplit,
)

Group: TypeAlias = LocalGroup | dist.ProcessGroup
CPU = torch.device("cpu")

# The drop-in classes, but for those that only others are made of.
CLASS_NAMES = [name for name in compat.__all__ if hasattr(getattr(compat, name), "schedule_name")]
# The registered schedules that have backwards.
TRAINING_NAMES = [name for name in schedules.names() if name != "ForwardOnly"]
# Those that most tests take, one of each placement: a chain, a loop, and both kinds of V.
SOME_NAMES = TRAINING_NAMES if IS_LONG else ["1F1B", "InterleavedZeroBubble", "ZB-V", "DualPipeV"]

# The unsplit model adds over the batch in one product, the pipeline over microbatches in turn, and
# a split backward adds in yet another order. Each addition is off by 1e-16 of its value, there
# are some hundred of them, and three steps feed on one another's results; which leaves room.
RTOL, ATOL = 1e-10, 1e-12


@dataclass(frozen=True)
class Run:
    """What to train, and how."""

    model: str
    schedule: str
    """A registered name, or that of a drop-in class."""
    num_ranks: int
    is_even: bool = True
    """Whether all microbatches have one size; else losses are sums, which do not care."""
    evaluates: bool = False
    """Whether each step is followed by an eval of the next batch, in the same pipeline."""
    num_steps: int = 3

    @property
    def shape(self) -> Shape:
        generator = schedules.get(_schedule_name(self.schedule))
        shape = Shape(self.num_ranks, 4 if self.is_even else 5, generator.stages_per_rank)
        return shape._replace(m=max(shape.m, generator.min_microbatches(shape)))

    @property
    def num_stages(self) -> int:
        return self.shape.p * self.shape.v

    @property
    def batch_size(self) -> int:
        return 2 * self.shape.m if self.is_even else 2 * self.shape.m + 1

    @property
    def reduction(self) -> str:
        return "mean" if self.is_even else "sum"


def rank_in(group: Group) -> int:
    return group.rank if isinstance(group, LocalGroup) else dist.get_rank(group)


def make_stages(
    group: Group, modules: Sequence[nn.Module | None], indices: Sequence[int], **options: Any
) -> list[PipelineStage]:
    """The stages with these indices; `modules` has one for each stage of the pipeline."""
    return [
        PipelineStage(modules[index], index, len(modules), CPU, group=group, **options)
        for index in indices
    ]


def build(group: Group, run: Run) -> tuple[Pipeline, dict[int, nn.Module]]:
    """One rank's pipeline, and its modules by stage."""
    model = MODELS[run.model]
    shape, num_stages = run.shape, run.num_stages
    schedule = schedules.get(_schedule_name(run.schedule))(
        num_ranks=shape.p, num_microbatches=shape.m
    )
    held = schedule.placement.stages_of(rank_in(group))
    own = {index: model.stage(index, num_stages) for index in held}
    modules = [own.get(index) for index in range(num_stages)]
    return _make_pipeline(run, model, make_stages(group, modules, held)), own


def train(group: Group, run: Run) -> list[StepRecord]:
    """One rank's share of the steps of a run."""
    model = MODELS[run.model]
    pipeline, own = build(group, run)
    optimizer = make_optimizer(own.values(), run.batch_size, run.reduction)
    records = []
    for step in range(run.num_steps):
        args, kwargs, target = model.batch(run.batch_size, step)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        outputs = pipeline.step(*args, target=target, losses=losses, **kwargs)
        records.append(StepRecord(outputs, losses, named_grads(own)))
        optimizer.step()
        if run.evaluates:
            args, kwargs, target = model.batch(run.batch_size, step + 1)
            losses = []
            outputs = pipeline.eval(*args, target=target, losses=losses, **kwargs)
            records.append(StepRecord(outputs, losses))
    return records


def evaluate(group: Group, run: Run) -> StepRecord:
    """One rank's share of one eval, of a pipeline that has never run a step."""
    model = MODELS[run.model]
    pipeline, _ = build(group, run)
    args, kwargs, target = model.batch(run.batch_size, 0)
    losses: list[Tensor] = []
    outputs = pipeline.eval(*args, target=target, losses=losses, **kwargs)
    return StepRecord(outputs, losses)


def assert_like_unsplit(run: Run, ranks: Sequence[Sequence[StepRecord]]) -> None:
    """Raises unless every step gave the outputs, losses and gradients of the unsplit model."""
    num_steps = run.num_steps + run.evaluates
    unsplit = train_unsplit(run.model, run.num_stages, run.batch_size, run.reduction, num_steps)
    expected = []
    for step, record in enumerate(unsplit[: run.num_steps]):
        expected.append(record)
        if run.evaluates:
            expected.append(StepRecord(unsplit[step + 1].outputs, unsplit[step + 1].losses))
    for rank in ranks:
        assert len(expected) == len(rank)
    for number, wanted in enumerate(expected):
        gathered = [records[number] for records in ranks]
        step = (number + 1) // 2 if run.evaluates else number
        losses = _losses_by_microbatch(run, wanted, step)
        assert_same_step(wanted, losses, gathered, f"record {number}")


def assert_evaluates_like_unsplit(run: Run, ranks: Sequence[StepRecord]) -> None:
    """Raises unless an eval gave the outputs and losses of the unsplit model, and no gradient."""
    args = run.model, run.num_stages, run.batch_size, run.reduction, 1
    expected = StepRecord(train_unsplit(*args)[0].outputs)
    assert_same_step(expected, _losses_by_microbatch(run, expected, 0), ranks, "eval")


def assert_same_step(
    expected: StepRecord, losses: Sequence[Tensor], ranks: Sequence[StepRecord], place: str
) -> None:
    """Compares one step; exactly one rank must have outputs, and each gradient is on one rank."""
    (last,) = (record for record in ranks if record.losses)
    assert [record is last for record in ranks] == [r.outputs is not None for r in ranks]
    assert_close(f"{place}, outputs", expected.outputs, last.outputs)
    assert_close(f"{place}, losses", list(losses), last.losses)
    assert_same_grads(place, expected.grads, [record.grads for record in ranks])


def assert_same_grads(
    place: str,
    expected: dict[str, Tensor | None],
    ranks: Sequence[dict[str, Tensor | None]],
) -> None:
    """Each parameter's gradient, by name; None where it is None."""
    assert sorted(expected) == sorted(name for grads in ranks for name in grads)
    actual = {name: grad for grads in ranks for name, grad in grads.items()}
    for name, grad in expected.items():
        assert (grad is None) == (actual[name] is None), f"{place}, gradient of {name}"
        assert_close(f"{place}, gradient of {name}", grad, actual[name])


def assert_close(place: str, expected: Any, actual: Any) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=RTOL, atol=ATOL, msg=lambda message: f"{place}: {message}"
    )


def split(value: Any, num_microbatches: int) -> list[Any]:
    """The parts of each microbatch; not by Penstock, so that it can be compared with it."""
    leaves, structure = pytree.tree_flatten(value)
    columns = [leaf.tensor_split(num_microbatches) for leaf in leaves]
    return [
        pytree.tree_unflatten([column[mb] for column in columns], structure)
        for mb in range(num_microbatches)
    ]


def _losses_by_microbatch(run: Run, record: StepRecord, step: int) -> list[Tensor]:
    model, m = MODELS[run.model], run.shape.m
    target = model.batch(run.batch_size, step).target
    parts = zip(split(record.outputs, m), split(target, m), strict=True)
    return [model.loss(outputs, wanted, run.reduction) for outputs, wanted in parts]


def _schedule_name(name: str) -> str:
    known: str = getattr(getattr(compat, name, None), "schedule_name", name)
    return known


def _make_pipeline(run: Run, model: Model, stages: list[PipelineStage]) -> Pipeline:
    options: dict[str, Any] = {
        "loss_fn": model.loss_fn(run.reduction),
        "scale_grads": run.is_even,
        "timeout": HANG_S,
    }
    if run.schedule not in CLASS_NAMES:
        return Pipeline(stages, run.schedule, num_microbatches=run.shape.m, **options)
    cls = getattr(compat, run.schedule)
    is_single = issubclass(cls, penstock.PipelineScheduleSingle)
    made: Pipeline = cls(stages[0] if is_single else stages, run.shape.m, **options)
    return made
