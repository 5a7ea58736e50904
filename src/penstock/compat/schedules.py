"""The schedule classes of torch.distributed.pipelining, and similar ones of Penstock.

Each binds a generator to stages; a pipeline of Penstock runs them all.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch.distributed as dist

from penstock.compat.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    WAIT_REDUCE_GRAD,
    WAIT_SEND_B,
    WAIT_SEND_F,
    _Action,
    _ComputationType,
)
from penstock.compat.custom_functions import _CustomFunctionProtocol, _PipelineContext
from penstock.compat.gather_limits import DEFAULT_ACTIVE_STAGES, Lookahead
from penstock.compat.liveness import (
    PipelineActivationLiveness,
    analyze_pipeline_activation_liveness,
)
from penstock.compat.schedule_base import _PipelineSchedule
from penstock.compat.schedule_kinds import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)
from penstock.compat.step_arguments import Options, OwnOptions
from penstock.errors import ScheduleError, StepError
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.step_settings import LossFn
from penstock.schedules import get
from penstock.stage import PipelineStage

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "UNSHARD",
    "WAIT_REDUCE_GRAD",
    "WAIT_SEND_B",
    "WAIT_SEND_F",
    "B",
    "F",
    "I",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "W",
    "_Action",
    "_ComputationType",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "_wait_batch_p2p",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]

F, I, W, B = FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD  # noqa: E741  # torch's names.


class _NamedMulti(_PipelineScheduleRuntime):
    """A schedule with several stages per rank whose order follows from its name."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = DEFAULT_ACTIVE_STAGES,
        unshard_lookahead: Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **own: Unpack[OwnOptions],
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            max_active_stages=max_active_stages,
            unshard_lookahead=unshard_lookahead,
            defer_reduce_grad_wait=defer_reduce_grad_wait,
            max_outstanding_sends=max_outstanding_sends,
            **own,
        )


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only, for inference."""

    schedule_name = "ForwardOnly"

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward; there is no loss, so targets and losses are refused."""
        if target is not None or losses is not None:
            raise StepError(
                "step() was given a target or losses, but this schedule has forwards only. "
                "Leave them out, or use a schedule such as ScheduleGPipe."
            )
        return super().step(*args, **kwargs)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward: at most as many activations as there are ranks."""

    schedule_name = "1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """Zero-bubble at the memory of 1F1B, with a third of its bubble."""

    schedule_name = "ZB-H1"


class ScheduleZBH2(PipelineScheduleSingle):
    """Zero-bubble at twice the memory of 1F1B."""

    schedule_name = "ZB-H2"


class ScheduleInterleaved1F1B(_NamedMulti):
    """1F1B with several stages per rank, round after round."""

    schedule_name = "Interleaved1F1B"


class ScheduleLoopedBFS(_NamedMulti):
    """GPipe with several stages per rank, breadth first."""

    schedule_name = "LoopedBFS"

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = DEFAULT_ACTIVE_STAGES,
        unshard_lookahead: Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **own: Unpack[OwnOptions],
    ) -> None:
        """Take the arguments in the order of torch, which leaves out the first two specs."""
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            max_active_stages=max_active_stages,
            unshard_lookahead=unshard_lookahead,
            defer_reduce_grad_wait=defer_reduce_grad_wait,
            max_outstanding_sends=max_outstanding_sends,
            **own,
        )


class ScheduleInterleavedZeroBubble(_NamedMulti):
    """Interleaved 1F1B whose weight backwards fill the bubble."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_NamedMulti):
    """Zero-bubble with two stages per rank in a V, at the memory of 1F1B."""

    schedule_name = "ZB-V"


class ScheduleVHalf(_NamedMulti):
    """Two stages per rank in a V, at half of the memory of 1F1B."""

    schedule_name = "V-Half"


class ScheduleVMin(_NamedMulti):
    """Two stages per rank in a V, at a third of the memory of 1F1B."""

    schedule_name = "V-Min"


class ScheduleDualPipeV(_NamedMulti):
    """Two stages per rank in a V, whose forwards and backwards overlap."""

    schedule_name = "DualPipeV"


class ScheduleAuto(_PipelineSchedule):
    """A schedule that is found for the stages while they train, for any placement."""

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        auto: Auto | None = None,
        **own: Unpack[OwnOptions],
    ) -> None:
        super().__init__(
            list(stages) if isinstance(stages, Sequence) else [stages],
            n_microbatches,
            Options(
                loss_fn,
                args_chunk_spec,
                kwargs_chunk_spec,
                output_merge_spec,
                scale_grads,
                **own,
            ),
            auto or Auto(),
        )


def _wait_batch_p2p(work: Sequence[dist.Work]) -> None:
    """Wait for transfers; those of a schedule are waited for by the actions that need them."""
    for transfer in work:
        transfer.wait()


_CLASSES: tuple[type[PipelineScheduleSingle | PipelineScheduleMulti], ...] = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleDualPipeV,
)
_BASES = (PipelineScheduleSingle, PipelineScheduleMulti)


def get_schedule_class(
    schedule_name: str,
) -> type[PipelineScheduleSingle | PipelineScheduleMulti | ScheduleAuto]:
    """Return the class of a schedule, by any of its names; case and hyphens do not matter.

    >>> get_schedule_class("zbvzerobubble").__name__
    'ScheduleZBVZeroBubble'
    """
    wanted = str(schedule_name).lower()
    if wanted in ("auto", "scheduleauto"):
        return ScheduleAuto
    for base in _BASES:
        if wanted == base.__name__.lower():
            return base
    by_name = {str(found.schedule_name): found for found in _CLASSES}
    name = get(schedule_name).name
    if name not in by_name:
        raise ScheduleError(
            f"The schedule {name} has no class of its own; the classes are for "
            f"{', '.join(sorted(by_name))}. Use Pipeline(stages, {name!r}, num_microbatches=...)."
        )
    return by_name[name]
