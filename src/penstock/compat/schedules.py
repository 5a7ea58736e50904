"""The schedule classes of torch.distributed.pipelining, and similar ones of Penstock.

Each binds a generator to stages; `Pipeline` runs them all.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ScheduleError, StageError
from penstock.microbatches.loss_weights import LossWeight
from penstock.runtime import Pipeline
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S
from penstock.runtime.step_settings import LossFn
from penstock.schedules import get
from penstock.stage import PipelineStage


class _TorchNames(Pipeline):
    """The attributes that scripts for torch.distributed.pipelining read and write."""

    @property
    def _loss_fn(self) -> LossFn | None:
        return self.loss_fn

    @_loss_fn.setter
    def _loss_fn(self, loss_fn: LossFn | None) -> None:
        self.loss_fn = loss_fn

    @property
    def _n_microbatches(self) -> int:
        return self.num_microbatches


class PipelineScheduleSingle(_TorchNames):
    """The base of schedules with one stage per rank."""

    schedule_name: ClassVar[str]

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        loss_weight: LossWeight | None = None,
        replica_group: dist.ProcessGroup | DeviceMesh | None = None,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        _check_is_no_base(type(self))
        if not isinstance(stage, PipelineStage):
            raise StageError(
                f"stage is a {type(stage).__name__}. {type(self).__name__} takes one "
                "penstock.PipelineStage; a schedule with several per rank takes a list."
            )
        super().__init__(
            stage,
            self.schedule_name,
            num_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            loss_weight=loss_weight,
            replica_group=replica_group,
            on_grads_ready=on_grads_ready,
            timeout=timeout,
        )


class PipelineScheduleMulti(_TorchNames):
    """The base of schedules with several stages per rank.

    `backward_requires_autograd` and `defer_pp_recv` are accepted so that scripts need not change:
    a backward always needs autograd, and receives are always posted as early as is useful.
    """

    schedule_name: ClassVar[str]

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
        *,
        loss_weight: LossWeight | None = None,
        replica_group: dist.ProcessGroup | DeviceMesh | None = None,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        _check_is_no_base(type(self))
        if not backward_requires_autograd:
            raise StageError(
                "backward_requires_autograd is False, but every backward here needs autograd. "
                "Leave it out; register_custom_function() can replace any action."
            )
        super().__init__(
            stages,
            self.schedule_name,
            num_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            loss_weight=loss_weight,
            replica_group=replica_group,
            on_grads_ready=on_grads_ready,
            timeout=timeout,
        )


def _check_is_no_base(kind: type) -> None:
    if not hasattr(kind, "schedule_name"):
        raise StageError(
            f"{kind.__name__} is a base class, not a schedule. Use a class such as "
            "Schedule1F1B, or penstock.Pipeline."
        )


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


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages per rank, round after round."""

    schedule_name = "Interleaved1F1B"


class ScheduleLoopedBFS(PipelineScheduleMulti):
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
        *,
        loss_weight: LossWeight | None = None,
        replica_group: dist.ProcessGroup | DeviceMesh | None = None,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
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
            loss_weight=loss_weight,
            replica_group=replica_group,
            on_grads_ready=on_grads_ready,
            timeout=timeout,
        )


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B whose weight backwards fill the bubble."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Zero-bubble with two stages per rank in a V, at the memory of 1F1B."""

    schedule_name = "ZB-V"


class ScheduleVHalf(PipelineScheduleMulti):
    """Two stages per rank in a V, at half of the memory of 1F1B."""

    schedule_name = "V-Half"


class ScheduleVMin(PipelineScheduleMulti):
    """Two stages per rank in a V, at a third of the memory of 1F1B."""

    schedule_name = "V-Min"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages per rank in a V, whose forwards and backwards overlap."""

    schedule_name = "DualPipeV"


class ScheduleAuto(_TorchNames):
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
        loss_weight: LossWeight | None = None,
        replica_group: dist.ProcessGroup | DeviceMesh | None = None,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(
            stages,
            auto or Auto(),
            num_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            loss_weight=loss_weight,
            replica_group=replica_group,
            on_grads_ready=on_grads_ready,
            timeout=timeout,
        )


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
    by_name = {found.schedule_name: found for found in _CLASSES}
    name = get(schedule_name).name
    if name not in by_name:
        raise ScheduleError(
            f"The schedule {name} has no class of its own; the classes are for "
            f"{', '.join(sorted(by_name))}. Use Pipeline(stages, {name!r}, num_microbatches=...)."
        )
    return by_name[name]
