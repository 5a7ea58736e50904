"""Trains a model of `staged_models` with the schedule "auto", over the change of its schedule.

`train_auto` is what each rank runs, with `penstock.local_ranks` or in a worker of `worker_pool`.
"""

import dataclasses
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from limits import HANG_S
from penstock import CostTable, Pipeline, Placement
from penstock.runtime.auto.auto_value import Auto
from stage_training import Group, assert_close, assert_same_grads, make_stages, rank_in
from staged_models import MODELS, StepRecord, make_optimizer, named_grads, train_unsplit


@dataclasses.dataclass(frozen=True)
class AutoRun:
    """What to train, and how; measured times are replaced by `costs`, so that the plan is known."""

    model: str
    placement: tuple[int, ...]
    num_microbatches: int = 4
    num_steps: int = 6
    costs: CostTable | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return 2 * self.num_microbatches

    @property
    def known_costs(self) -> CostTable:
        return self.costs or CostTable.uniform(len(self.placement))


@dataclasses.dataclass
class AutoRecord:
    """What a rank saw: each step, the schedule that it left, and an eval behind each."""

    steps: list[StepRecord]
    schedules: list[str]


def train_auto(group: Group, run: AutoRun) -> AutoRecord:
    """One rank's share of the steps; an eval comes before each of them."""
    model = MODELS[run.model]
    num_stages = len(run.placement)
    held = Placement(run.placement).stages_of(rank_in(group))
    own = {index: model.stage(index, num_stages) for index in held}
    stages = make_stages(group, [own.get(index) for index in range(num_stages)], held)
    pipeline = Pipeline(
        stages,
        Auto(**{"seconds": 5, **run.options}),
        num_microbatches=run.num_microbatches,
        loss_fn=model.loss_fn("mean"),
        timeout=HANG_S,
    )
    optimizer = make_optimizer(own.values(), run.batch_size, "mean")
    record = AutoRecord([], [])
    # Only rank 0 plans; local ranks share the module that is patched.
    known = mock.patch("penstock.runtime.auto.auto_pilot.join", return_value=run.known_costs)
    with known if rank_in(group) == 0 else nullcontext():
        for step in range(run.num_steps):
            args, kwargs, target = model.batch(run.batch_size, step)
            optimizer.zero_grad()
            evaluated = pipeline.eval(*args, **kwargs)
            losses: list[Tensor] = []
            outputs = pipeline.step(*args, target=target, losses=losses, **kwargs)
            if outputs is not None:
                assert_close("outputs of eval", outputs, evaluated)
            record.steps.append(StepRecord(outputs, losses, named_grads(own)))
            record.schedules.append(pipeline.schedule.to_csv())
            optimizer.step()
    return record


def assert_trained_alike(run: AutoRun, ranks: list[AutoRecord]) -> None:
    """Raises unless each step gave what the unsplit model gives, and all ranks ran one schedule."""
    unsplit = train_unsplit(run.model, len(run.placement), run.batch_size, "mean", run.num_steps)
    for rank in ranks:
        assert ranks[0].schedules == rank.schedules
    for number, expected in enumerate(unsplit):
        records = [rank.steps[number] for rank in ranks]
        (last,) = (record for record in records if record.losses)
        assert_close(f"step {number}, outputs", expected.outputs, last.outputs)
        assert_close(f"step {number}, loss", expected.losses[0], torch.stack(last.losses).mean())
        assert_same_grads(f"step {number}", expected.grads, [record.grads for record in records])
