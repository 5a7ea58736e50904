"""A cost table of real stages on real ranks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.comm import AbstractComm
from penstock.comm.decisions import decide
from penstock.costs import CostTable
from penstock.errors import CostError
from penstock.ir import Message, Placement, Schedule
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.measuring.measuring_steps import Measuring, join
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S, Pipeline
from penstock.runtime.step_settings import LossFn
from penstock.solver.safe_schedules import safe_schedule
from penstock.stage import PipelineStage
from penstock.stage.passage import stand_in_for
from penstock.stage.unchanged import kept_as_it_was
from penstock.torch_private import pytree

LOGGER = logging.getLogger("penstock")


def measure_costs(
    stages: PipelineStage | Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: LossFn,
    *args: Any,
    target: Any = None,
    kwargs: dict[str, Any] | None = None,
    loss_kwargs: dict[str, Any] | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    repeats: int = 3,
    warm_up: int = 1,
    timeout: float = DEFAULT_TIMEOUT_S,
    recompute: bool = False,
) -> CostTable:
    """Measure what the stages cost, in seconds and bytes, in steps with this batch.

    All ranks must call it, each with its own stages and with what it would give `step`; all get
    the same table. `warm_up` steps count memory; `repeats` steps are timed with split backwards,
    and as many with full backwards. With `recompute`, one more step counts the memory of stages
    whose forwards are recomputed, and `repeats` more are timed. Gradients, buffers and the random
    state are left as they were; hooks on gradients run as in training.
    """
    return measure_stages(
        CostPilot(warm_up, repeats, recompute=recompute),
        stages,
        num_microbatches,
        loss_fn,
        *args,
        target=target,
        kwargs=kwargs,
        loss_kwargs=loss_kwargs,
        args_chunk_spec=args_chunk_spec,
        kwargs_chunk_spec=kwargs_chunk_spec,
        timeout=timeout,
    )


def measure_stages(
    pilot: "CostPilot",
    stages: PipelineStage | Sequence[PipelineStage],
    num_microbatches: int,
    loss_fn: LossFn,
    *args: Any,
    target: Any = None,
    kwargs: dict[str, Any] | None = None,
    loss_kwargs: dict[str, Any] | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> CostTable:
    """Run the steps of the pilot; the other arguments are those of `measure_costs`."""
    if loss_fn is None:
        raise CostError(
            "loss_fn is None, but without a loss there is no backward to measure. Give the "
            "loss_fn of the training."
        )
    pipeline = Pipeline(
        stages,
        pilot,
        num_microbatches=num_microbatches,
        loss_fn=loss_fn,
        args_chunk_spec=args_chunk_spec,
        kwargs_chunk_spec=kwargs_chunk_spec,
        timeout=timeout,
    )
    given = (args, kwargs or {}, target, loss_kwargs)
    own_args, own_kwargs, own_target, own_loss_kwargs = pytree.tree_map_only(
        Tensor, stand_in_for, given
    )
    modules = [stage.submod for stage in pipeline.stages.values()]
    if isinstance(loss_fn, nn.Module):
        modules.append(loss_fn)
    with ExitStack() as stack:
        stack.callback(pipeline.close)
        for module in modules:
            stack.enter_context(kept_as_it_was(module))
            stack.enter_context(_without_grads(module))
        while pilot.costs is None:
            pipeline.step(
                *own_args,
                target=own_target,
                return_outputs=False,
                loss_kwargs=own_loss_kwargs,
                **own_kwargs,
            )
    return pilot.costs


class CostPilot(AbstractPilot):
    """A pilot that chooses the steps in which costs are measured, and then has the costs.

    `title` says what is measured, if there is more to say than the stages; it is logged.
    """

    def __init__(
        self, warm_up: int, repeats: int, title: str = "", *, recompute: bool = False
    ) -> None:
        for name, value in (("repeats", repeats), ("warm_up", warm_up)):
            if not isinstance(value, int) or value < 1:
                raise CostError(f"{name} is {value!r}. Expected a whole number, at least 1.")
        self.costs: CostTable | None = None
        self._counts = warm_up, repeats
        self._title = title
        self._recompute = recompute

    @property
    def options(self) -> str:
        counts = "warm_up {}, repeats {}".format(*self._counts)
        if self._recompute:
            counts += ", recompute"
        return f"{counts}, {self._title}" if self._title else counts

    def start(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Schedule:
        warm_up, repeats = self._counts
        self._comm, self._device = comm, device
        if self._title and comm.rank == 0:
            LOGGER.info("measuring %s", self._title)
        self._measuring = Measuring(
            safe_schedule(placement, num_microbatches),
            device,
            warm_up=warm_up,
            repeats=repeats,
            recompute=self._recompute,
        )
        return self._measuring.schedule

    def make_observer(self) -> Observer:
        return self._measuring.make_observer()

    def end_step(
        self, observer: Observer, forms: Mapping[Message, Form], work: Sequence[float]
    ) -> Schedule:
        self._measuring.take(observer)
        if self._measuring.is_done:
            share = self._measuring.share(self._comm, forms)
            self.costs = decide(self._comm, self._device, share, join, "the costs of all stages")
        return self._measuring.schedule


@contextmanager
def _without_grads(module: nn.Module) -> Iterator[None]:
    """Remove the gradients of the parameters, and put the same tensors back at the end."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    values = [(grad, grad.clone()) for _, grad in before if grad is not None]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for changed, value in values:
            changed.copy_(value)  # It may be a view of a bucket that was written to.
        for parameter, grad in before:
            parameter.grad = grad
