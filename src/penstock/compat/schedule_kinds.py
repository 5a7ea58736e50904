"""The kinds of schedules in torch: one stage per rank, several, and orders that are loaded."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch.distributed as dist

from penstock.compat.actions import Order, as_order, format_order, read_order
from penstock.compat.gather_limits import (
    DEFAULT_ACTIVE_STAGES,
    GatherLimits,
    Lookahead,
)
from penstock.compat.schedule_base import _PipelineSchedule
from penstock.compat.step_arguments import Options, OwnOptions
from penstock.errors import ScheduleError, StageError
from penstock.ir import Schedule, StageId
from penstock.passes import Gathers, add_comms, add_gathers, remove_comms
from penstock.runtime.step_settings import LossFn
from penstock.stage import PipelineStage
from penstock.torch_private import LOADS_WAITS

_LOGGER = logging.getLogger(__name__)

Format = Literal["compute_only", "compute_comms"]


class PipelineScheduleSingle(_PipelineSchedule):
    """The base of schedules with one stage per rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **own: Unpack[OwnOptions],
    ) -> None:
        check_runs_orders(type(self))
        if not hasattr(self, "schedule_name"):
            raise StageError(
                f"{type(self).__name__} is a base class, not a schedule. Use a class such as "
                "Schedule1F1B, or penstock.Pipeline."
            )
        if not isinstance(stage, PipelineStage):
            raise StageError(
                f"stage is a {type(stage).__name__}. {type(self).__name__} takes one "
                "penstock.PipelineStage; a schedule with several per rank takes a list."
            )
        super().__init__(
            [stage],
            n_microbatches,
            Options(
                loss_fn,
                args_chunk_spec,
                kwargs_chunk_spec,
                output_merge_spec,
                scale_grads,
                **own,
            ),
        )

    @property
    def _stage(self) -> PipelineStage:
        return self._first

    @property
    def _stage_forward_initialized(self) -> bool:
        return self._knows_forms

    @_stage_forward_initialized.setter
    def _stage_forward_initialized(self, value: bool) -> None:
        self._knows_forms = value

    @property
    def _stage_backward_initialized(self) -> bool:
        return self._knows_forms and self._trained

    @_stage_backward_initialized.setter
    def _stage_backward_initialized(self, value: bool) -> None:
        self._knows_forms = value


class PipelineScheduleMulti(_PipelineSchedule):
    """The base of schedules with several stages per rank.

    A subclass may fill `pipeline_order`, or a file may be loaded into it; the first step runs it.
    `backward_requires_autograd` must be True: a backward always needs autograd here.
    `use_full_backward` has no effect, as in torch.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        **own: Unpack[OwnOptions],
    ) -> None:
        check_runs_orders(type(self))
        if not backward_requires_autograd:
            raise StageError(
                "backward_requires_autograd is False, but every backward here needs autograd. "
                "Leave it out; register_custom_function() can replace any action."
            )
        if use_full_backward is not None:
            _LOGGER.warning("use_full_backward has no effect: the order says what is split.")
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
        )

    @property
    def _stages(self) -> list[PipelineStage]:
        return self._held

    @property
    def pp_group_size(self) -> int:
        """The number of ranks."""
        return self._first.group_size

    @pp_group_size.setter
    def pp_group_size(self, value: int) -> None:
        self._claim("pp_group_size", value)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._first.group_rank

    @rank.setter
    def rank(self, value: int) -> None:
        self._claim("rank", value)

    @property
    def _stages_forward_initialized(self) -> bool:
        return self._knows_forms

    @_stages_forward_initialized.setter
    def _stages_forward_initialized(self, value: bool) -> None:
        self._knows_forms = value

    @property
    def _stages_backward_initialized(self) -> bool:
        return self._knows_forms and self._trained

    @_stages_backward_initialized.setter
    def _stages_backward_initialized(self, value: bool) -> None:
        self._knows_forms = value

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Take the order from a file, before the first step."""
        _check_format(format)
        order = read_order(filename)
        if format == "compute_only":
            for rank, row in order.items():
                for place, action in enumerate(row):
                    if action is not None and not action.is_compute_op:
                        raise ScheduleError(
                            f"{filename}, rank {rank}, cell {place}: {action} is not a forward or "
                            "backward, but the format is compute_only. Load it with "
                            'format="compute_comms".'
                        )
        self.pipeline_order = order
        self._plan_order()

    def _dump_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Write the order to a file that torch can load too."""
        _check_format(format)
        is_whole = format == "compute_comms"
        Path(filename).write_text(
            self._with_comms().to_csv(has_waits=LOADS_WAITS)
            if is_whole
            else format_order(self.pipeline_order)
        )

    @property
    def pipeline_order_with_comms(self) -> Order:
        """The order with messages, gathers and reductions; a new dict each time."""
        return as_order(self._with_comms())

    def _with_comms(self) -> Schedule:
        bare = remove_comms(self.schedule)
        gathered = bare if bare.has_sharding else add_gathers(bare, Gathers.once())
        return add_comms(gathered)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """The base of schedules in torch whose orders have messages.

    Here, messages are added to any order. `max_active_stages` limits how many FSDP2 stages a rank
    has gathered at once, and `unshard_lookahead` how many it gathers early. Three arguments have no
    effect. `defer_pp_recv`: receives are always posted as early as is useful.
    `defer_reduce_grad_wait`: reductions are always waited for at the end of the step.
    `max_outstanding_sends`: sends are waited for at the end of the step; the log says so.
    """

    def __init__(
        self,
        *args: Any,
        defer_pp_recv: bool = False,
        max_active_stages: int = DEFAULT_ACTIVE_STAGES,
        unshard_lookahead: Lookahead = "full",
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._limits = GatherLimits(max_active_stages, unshard_lookahead)
        super().__init__(*args, **kwargs)
        _check_outstanding_sends(max_outstanding_sends, self.pp_group_size)

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Take the order; with "compute_comms", it has messages."""
        _check_format(format)
        self.pipeline_order = actions
        self._plan_order()

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:
        super()._dump_csv(filename, format)

    @property
    def fwd_recv_ops(self) -> "_Arrived":
        """The receives to wait for before a forward: none, as an action waits by itself."""
        return _Arrived()

    @property
    def bwd_recv_ops(self) -> "_Arrived":
        """The receives to wait for before a backward: none, as an action waits by itself."""
        return _Arrived()

    def _assert_unsharded(self, stage: PipelineStage) -> None:
        """Do nothing: a forward or backward waits for its parameters by itself."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        """Do nothing: the forward of the last stage computes its loss by itself."""

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> None:
        """Return nothing: the backward of the last stage knows its loss by itself."""

    @property
    def backward_counter(self) -> Counter[StageId]:
        """The number of weight gradients that each stage added in the last step."""
        if not self._trained:
            return Counter()
        return Counter({stage: self.num_microbatches for stage in self.stages})


class _Arrived(dict[tuple[StageId, int], list[dist.Work]]):
    """The receives of all messages, each with nothing left to wait for."""

    def __contains__(self, key: object) -> bool:
        return True

    def pop(self, key: tuple[StageId, int], *default: Any) -> list[dist.Work]:
        return []


def check_runs_orders(kind: type[_PipelineSchedule]) -> None:
    """Raise an error if a subclass brings a loop of its own, which would be ignored."""
    if kind._step_microbatches is not _PipelineSchedule._step_microbatches:
        raise StageError(
            f"{kind.__name__} overrides _step_microbatches, but Penstock runs every step from an "
            "order. Derive it from PipelineScheduleMulti, and fill pipeline_order instead."
        )


def _check_outstanding_sends(limit: Any, num_ranks: int) -> None:
    """Raise an error if the limit cannot be kept; say that others make no difference."""
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ScheduleError(
            f"max_outstanding_sends is {limit!r}. Expected a whole number of messages, at least 0, "
            "or None for no limit."
        )
    if limit == 0 and num_ranks > 1:
        raise ScheduleError(
            f"max_outstanding_sends is 0, but {num_ranks} ranks cannot work without messages. "
            "Expected at least 1, or None for no limit."
        )
    _LOGGER.warning(
        "max_outstanding_sends=%d has no effect: sends are waited for at the end of the step, and "
        "released earlier where a message from the receiver shows that they have arrived.",
        limit,
    )


def _check_format(format: str) -> None:
    if format not in ("compute_only", "compute_comms"):
        raise ScheduleError(f'format is {format!r}. Expected "compute_only" or "compute_comms".')
