"""Trains a model of `cut_models` in a pipeline, and compares it with the whole model.

`train_cut` is what each rank runs, with `penstock.local_ranks` or in a worker of `worker_pool`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from cut_models import CUT_MODELS, CutModel
from limits import HANG_S
from penstock import Pipe, Pipeline, schedules
from stage_training import Group, assert_close, rank_in
from staged_models import MOMENTUM, Batch, StepRecord

ROWS = 2
NUM_MICROBATCHES = 4
LEARNING_RATE = 0.05
Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class CutRun:
    """What to train, and how."""

    model: str
    num_stages: int
    schedule: str
    num_steps: int = 3

    @property
    def num_ranks(self) -> int:
        return self.num_stages // schedules.get(self.schedule).stages_per_rank

    @property
    def cut_model(self) -> CutModel:
        return CUT_MODELS[self.model]

    @property
    def batches(self) -> list[Batch]:
        """One for each step."""
        size = ROWS * NUM_MICROBATCHES
        return [self.cut_model.batch(size, step) for step in range(self.num_steps)]

    def pipe(self) -> Pipe:
        """The model, made and cut anew."""
        return cut(self.cut_model, self.num_stages)


@dataclass
class RankRecord:
    """What one rank has after its steps."""

    steps: list[StepRecord] = field(default_factory=list)
    """Gradients have the names of the model; a tied one is there for each stage that holds it."""
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """The state dict of each of its stages, in the end."""


def cut(model: CutModel, num_stages: int, whole: nn.Module | None = None) -> Pipe:
    """Trace a model on one microbatch, and cut it."""
    args, kwargs, _ = model.batch(ROWS, 0)
    whole = model.model(num_stages) if whole is None else whole
    return penstock.cut(whole, args, kwargs, split_spec=model.find_cuts(num_stages))


def train_cut(group: Group, run: CutRun, pipe: Pipe | None = None) -> RankRecord:
    """One rank's share of the steps of a run. Without a pipe it makes and cuts the model itself."""
    pipe = run.pipe() if pipe is None else pipe
    return train_pipe(group, pipe, run.schedule, run.batches, run.cut_model.loss)


def train_pipe(
    group: Group,
    pipe: Pipe,
    schedule_name: str,
    batches: Sequence[Batch],
    loss_fn: Loss,
    dynamic_shapes: bool = False,
) -> RankRecord:
    """One rank's share of a step for each batch."""
    generator = schedules.get(schedule_name)
    num_ranks = pipe.num_stages // generator.stages_per_rank
    schedule = generator(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES)
    held = schedule.placement.stages_of(rank_in(group))
    stages = [
        pipe.build_stage(index, "cpu", group, dynamic_shapes=dynamic_shapes) for index in held
    ]
    pipeline = Pipeline(stages, schedule, loss_fn=loss_fn, timeout=HANG_S)
    modules = [stage.submod for stage in stages]
    optimizer = _optimizer(modules)
    record = RankRecord()
    for args, kwargs, target in batches:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        outputs = pipeline.step(*args, target=target, losses=losses, **kwargs)
        grads = {
            f"{index} {name}": grad
            for index, module in zip(held, modules, strict=True)
            for name, grad in _grads(module).items()
        }
        record.steps.append(StepRecord(outputs, losses, grads))
        optimizer.step()
    record.states = [{k: v.clone() for k, v in m.state_dict().items()} for m in modules]
    return record


def train_whole(model: nn.Module, batches: Sequence[Batch], loss_fn: Loss) -> list[StepRecord]:
    """The same steps of the whole model, microbatch by microbatch."""
    optimizer = _optimizer([model])
    records = []
    for batch in batches:
        optimizer.zero_grad()
        parts, losses = [], []
        for args, kwargs, target in _microbatches(batch):
            outputs = model(*args, **kwargs)
            loss = loss_fn(outputs, target)
            (loss / NUM_MICROBATCHES).backward()
            parts.append(pytree.tree_map_only(Tensor, Tensor.detach, outputs))
            losses.append(loss.detach())
        records.append(StepRecord(_join(parts), losses, _grads(model)))
        optimizer.step()
    return records


def assert_like_whole(run: CutRun, ranks: Sequence[RankRecord]) -> None:
    """Raises unless every step gave the outputs, losses and gradients of the whole model."""
    model = run.cut_model.model(run.num_stages)
    assert_trained_like(model, run.batches, run.cut_model.loss, ranks)


def assert_trained_like(
    model: nn.Module, batches: Sequence[Batch], loss_fn: Loss, ranks: Sequence[RankRecord]
) -> None:
    """Trains a model as it is, and raises unless the ranks have the same."""
    for step, wanted in enumerate(train_whole(model, batches, loss_fn)):
        assert_same_step(wanted, [record.steps[step] for record in ranks], f"step {step}")
    state = model.state_dict()
    states = [state for record in ranks for state in record.states]
    assert set(state) == {name for stage in states for name in stage}
    for stage in states:
        for name, value in stage.items():
            assert_close(f"{name} in the end", state[name], value)


def assert_same_step(wanted: StepRecord, found: Sequence[StepRecord], place: str) -> None:
    """Compares one step of all ranks; gradients of all stages."""
    (last,) = (record for record in found if record.losses)
    assert_close(f"{place}, outputs", wanted.outputs, last.outputs)
    assert_close(f"{place}, losses", wanted.losses, last.losses)
    grads = {key: grad for record in found for key, grad in record.grads.items()}
    assert set(wanted.grads) == {key.partition(" ")[2] for key in grads}
    for key, grad in grads.items():
        expected = wanted.grads[key.partition(" ")[2]]
        assert (expected is None) == (grad is None), f"{place}, gradient of {key}"
        assert_close(f"{place}, gradient of {key}", expected, grad)


def _microbatches(batch: Batch) -> list[Batch]:
    """Not by Penstock, so that it can be compared with it."""
    leaves, structure = pytree.tree_flatten(batch)
    columns = [
        [part.clone() for part in leaf.tensor_split(NUM_MICROBATCHES)]
        if isinstance(leaf, Tensor)
        else [leaf] * NUM_MICROBATCHES
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([column[mb] for column in columns], structure)
        for mb in range(NUM_MICROBATCHES)
    ]


def _join(parts: Sequence[Any]) -> Any:
    leaves = [pytree.tree_leaves(part) for part in parts]
    joined = [
        torch.cat(column) if isinstance(column[0], Tensor) else column[0]
        for column in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(parts[0]))


def _grads(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each parameter's gradient, under each of its names."""
    return {
        name: None if param.grad is None else param.grad.clone()
        for name, param in module.named_parameters(remove_duplicate=False)
    }


def _optimizer(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    params = [param for module in modules for param in module.parameters()]
    params = params or [torch.zeros(1, requires_grad=True)]  # Not every stage has some.
    return torch.optim.SGD(params, LEARNING_RATE, momentum=MOMENTUM)
