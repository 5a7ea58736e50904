"""A step of torch's own schedule beside one of ours, to compare their gradients.

Both run on the same modules, one after the other: torch's first, from the same random state, and
with gradients and buffers put back afterwards. So nothing is copied that cannot be, such as
sharded modules.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.backward.structure import tensors_in
from penstock.compat.actions import Order
from penstock.replacing.import_hook import THEIRS, torch_in_place
from penstock.stage import PipelineStage
from penstock.stage.dtensors import local_part
from penstock.torch_private import is_dtensor


@dataclass(frozen=True, slots=True)
class Beside:
    """The facts from which torch's own schedule is made."""

    class_name: str
    stages: Sequence[PipelineStage]
    order: Order
    num_microbatches: int
    options: dict[str, Any]
    """The arguments that both packages have, besides the stages and the number above."""


def compare_step(
    beside: Beside, inputs: Any, run_on: Callable[[Any], Any], run_own: Callable[[], Any]
) -> Any:
    """Run a step on torch's schedule, then on ours; say how much the gradients differ.

    `run_on` takes torch's schedule. An error of torch's is reported, not raised.
    """
    parameters = {
        f"{name} of stage {stage.stage_index}": parameter
        for stage in beside.stages
        for name, parameter in stage.submod.named_parameters()
        if parameter.requires_grad
    }
    leaves = [x for x in tensors_in(inputs) if x.requires_grad and x.is_leaf]
    theirs: dict[str, Tensor | None] | None = None
    with _put_back(beside.stages, leaves):
        try:
            with torch_in_place():
                run_on(_make_theirs(beside))
            theirs = {name: _copied(p.grad) for name, p in parameters.items()}
        except Exception as exc:  # Said at once: the other ranks may wait for this one.
            _say(beside, f"torch's own step failed: {type(exc).__name__}: {exc}")
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    result = run_own()
    ours = {name: _copied(parameter.grad) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if (kept := before[name]) is not None:
            parameter.grad = kept if parameter.grad is None else kept + parameter.grad
    if theirs is not None:
        _say(beside, _difference(theirs, ours))
    return result


def _say(beside: Beside, text: str) -> None:
    rank = beside.stages[0].group_rank
    line = f"penstock: rank {rank}, {beside.class_name}: {' '.join(text.split())}\n"
    sys.stderr.write(line)
    sys.stderr.flush()


def _make_theirs(beside: Beside) -> Any:
    """Make torch's schedule: by its name, or from the order where it has no such class."""
    schedules, stages = import_module(f"{THEIRS}.schedules"), import_module(f"{THEIRS}.stage")
    held = [
        stages.PipelineStage(
            stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group
        )
        for stage in beside.stages
    ]
    found = getattr(schedules, beside.class_name, None)
    if found is not None and issubclass(found, schedules.PipelineScheduleSingle):
        return found(held[0], beside.num_microbatches, **beside.options)
    if found not in (None, schedules.PipelineScheduleMulti, schedules._PipelineScheduleRuntime):
        return found(held, beside.num_microbatches, **beside.options)
    made = schedules._PipelineScheduleRuntime(held, beside.num_microbatches, **beside.options)
    made._prepare_schedule_with_comms(
        {
            rank: [None if cell is None else schedules._Action.from_str(str(cell)) for cell in row]
            for rank, row in beside.order.items()
        },
        format="compute_only" if _is_bare(beside.order) else "compute_comms",
    )
    return made


def _is_bare(order: Order) -> bool:
    return all(cell is None or cell.is_compute_op for row in order.values() for cell in row)


@contextmanager
def _put_back(stages: Sequence[PipelineStage], leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leave no gradients in the block; put gradients, buffers and random state back after it."""
    modules = [stage.submod for stage in stages]
    owners = [*(p for module in modules for p in module.parameters()), *leaves]
    grads = [(owner, owner.grad) for owner in owners]
    buffers = [(b, b.clone()) for module in modules for b in module.buffers()]
    for owner in owners:
        owner.grad = None
    devices = sorted({s.device for s in stages if s.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for owner, grad in grads:
                owner.grad = grad
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _copied(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (local_part(grad) if is_dtensor(grad) else grad).detach().clone()


def _difference(theirs: dict[str, Tensor | None], ours: dict[str, Tensor | None]) -> str:
    """Return the largest difference of any gradient, in words."""
    one_sided = [name for name in ours if (ours[name] is None) != (theirs[name] is None)]
    if one_sided:
        where = "Penstock" if ours[one_sided[0]] is not None else "torch"
        return f"{one_sided[0]} has a gradient from {where} only ({len(one_sided)} such parameters)"
    largest, place = 0.0, ""
    for name, own in ours.items():
        if own is not None and own.numel():
            other = theirs[name]
            assert other is not None
            found = (own.double() - other.double()).abs().max().item()
            if not found <= largest:
                largest, place = found, name
    total = sum(grad is not None for grad in ours.values())
    at = f", in {place}" if place else ""
    return f"the largest difference of any of {total} gradients is {largest:.3g}{at}"
