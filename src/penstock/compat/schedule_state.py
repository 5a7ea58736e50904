"""The state of torch's schedules: their stages, their options, their order and their pipeline."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

from penstock.compat.actions import Order, as_order, as_schedule, copy_order
from penstock.compat.drop_in_pipeline import DropInPipeline
from penstock.compat.gather_limits import GatherLimits
from penstock.compat.stage import ranks_known_to, set_ranks
from penstock.compat.step_arguments import Options
from penstock.errors import ScheduleError, StageError
from penstock.ir import Action, Schedule, StageId
from penstock.microbatches.loss_weights import LossWeight
from penstock.replacing.import_hook import COMPARE
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.pipeline_checks import as_schedule as schedule_for
from penstock.runtime.pipeline_checks import check_count, check_fit, check_stages
from penstock.runtime.step_settings import CustomFunction, LossFn
from penstock.sealed import Sealed
from penstock.stage import PipelineStage


class ScheduleState(Sealed):
    """The stages of this rank and their schedule, under the names that torch uses.

    A pipeline runs the steps. It is made when the order is known, and made again after a step
    that failed on all ranks, so that the schedule stays usable.
    """

    settable = ("loss_fn", "scale_grads", "loss_weight")
    schedule_name: ClassVar[str]
    """The name of the schedule; bases and classes without a fixed order have none."""
    _limits: GatherLimits | None = None
    """The limits by which sharded stages are gathered, if the class takes any."""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        options: Options,
        plan: Schedule | Auto | None = None,
    ) -> None:
        theirs = frozenset(self.__dict__)
        self._held = list(stages)
        check_stages(self._held)
        _refuse_parts(self._held, type(self).__name__)
        self._first = self._held[0]
        self.num_microbatches = check_count(n_microbatches)
        self._options = options
        self._functions: dict[type[Action], CustomFunction] = {}
        self._plan = plan
        self._order: Order | None = None
        """The order as clients see it: they may fill or change it between steps."""
        self._planned: Order | None = None
        """A copy of the order from which `_plan` was made, if it was made from one."""
        self._num_steps = 0
        self._trained = False
        self._compares = os.environ.get(COMPARE) == "1"
        """True if the next training step runs on torch's schedule too."""
        self._pipeline: DropInPipeline | None = None
        if plan is None and hasattr(self, "schedule_name"):
            self._plan = schedule_for(self.schedule_name, self._held, n_microbatches)
        if self._plan is not None:
            self._make_pipeline()
        self._seal(theirs)

    # 1. Attributes of Penstock's pipelines.

    @property
    def stages(self) -> Mapping[StageId, PipelineStage]:
        """The stages that this rank holds, by their numbers."""
        return {stage.stage_index: stage for stage in self._held}

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        return self._ready().schedule

    @property
    def loss_fn(self) -> LossFn | None:
        """The function that computes a microbatch's loss from its outputs and its target."""
        return self._options.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: LossFn | None) -> None:
        if self._pipeline is not None:
            self._pipeline.loss_fn = loss_fn
        self._options = replace(self._options, loss_fn=loss_fn)

    @property
    def scale_grads(self) -> bool:
        """True if gradients are those of the mean over the batch, not of the sum of losses."""
        return self._options.scale_grads

    @scale_grads.setter
    def scale_grads(self, scale_grads: bool) -> None:
        if self._pipeline is not None:
            self._pipeline.scale_grads = scale_grads
        self._options = replace(self._options, scale_grads=scale_grads)

    @property
    def loss_weight(self) -> LossWeight | None:
        """The function from a microbatch's target to its weight in the mean over the batch."""
        return self._options.loss_weight

    @loss_weight.setter
    def loss_weight(self, loss_weight: LossWeight | None) -> None:
        if self._pipeline is not None:
            self._pipeline.loss_weight = loss_weight
        self._options = replace(self._options, loss_weight=loss_weight)

    # 2. Attributes of torch's schedules.

    @property
    def _loss_fn(self) -> LossFn | None:
        return self.loss_fn

    @_loss_fn.setter
    def _loss_fn(self, loss_fn: LossFn | None) -> None:
        self.loss_fn = loss_fn

    @property
    def _n_microbatches(self) -> int:
        return self.num_microbatches

    @property
    def _num_stages(self) -> int:
        return self._first.num_stages

    @property
    def _has_backward(self) -> bool:
        return self.loss_fn is not None

    @property
    def _args_chunk_spec(self) -> Any:
        return self._options.args_chunk_spec

    @_args_chunk_spec.setter
    def _args_chunk_spec(self, spec: Any) -> None:
        self._set_specs(replace(self._options, args_chunk_spec=spec))

    @property
    def _kwargs_chunk_spec(self) -> Any:
        return self._options.kwargs_chunk_spec

    @_kwargs_chunk_spec.setter
    def _kwargs_chunk_spec(self, spec: Any) -> None:
        self._set_specs(replace(self._options, kwargs_chunk_spec=spec))

    @property
    def _output_merge_spec(self) -> Any:
        return self._options.output_merge_spec

    @_output_merge_spec.setter
    def _output_merge_spec(self, spec: Any) -> None:
        self._set_specs(replace(self._options, output_merge_spec=spec))

    def _set_specs(self, options: Options) -> None:
        self._options = options
        if self._pipeline is not None:
            self._pipeline.set_specs(
                options.args_chunk_spec, options.kwargs_chunk_spec, options.output_merge_spec
            )

    @property
    def _knows_forms(self) -> bool:
        return self._pipeline is not None and self._num_steps > 0

    @_knows_forms.setter
    def _knows_forms(self, value: bool) -> None:
        """Learn the shapes of messages again after False, as torch does; True is refused."""
        if value and not self._knows_forms:
            raise StageError(
                "the stages were set to initialized, but no step has run yet, so the shapes of "
                "messages are not known. Expected False, to learn them again in the next step."
            )
        if not value and self._pipeline is not None:
            self._pipeline.forget_forms()

    @property
    def pipeline_order(self) -> Order:
        """The actions of all ranks; a change counts from the next step on."""
        if self._order is None:
            plan = self._plan
            self._order = as_order(plan) if isinstance(plan, Schedule) else {}
            self._planned = copy_order(self._order)
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: Order) -> None:
        self._order = order

    @property
    def stage_index_to_group_rank(self) -> dict[StageId, int]:
        """The rank of each stage."""
        self._plan_order()
        if isinstance(self._plan, Schedule):
            return dict(enumerate(self._plan.placement.ranks))
        return ranks_known_to(self._first)

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, ranks: dict[StageId, int]) -> None:
        self._claim("stage_index_to_group_rank", ranks)

    def _claim(self, name: str, value: Any) -> None:
        """Note what a subclass says of its ranks, which follows from its stages and its order.

        torch's own classes assign these. The first step checks that it is true.
        """
        self.__dict__.setdefault("_claims", {})[name] = value

    def _check_claims(self) -> None:
        claims = self.__dict__.get("_claims", {})
        for name in [*claims]:
            if (value := claims.pop(name)) != (known := getattr(self, name)):
                raise StageError(
                    f"{name} of {type(self).__name__} was set to {value}, but its stages and its "
                    f"order say {known}. Expected the same: leave the assignment out."
                )

    # 3. The pipeline.

    def _ready(self) -> DropInPipeline:
        """Return the pipeline for the order as it is now."""
        self._plan_order()
        if self._plan is None:
            raise StageError(
                f"{type(self).__name__} has no order yet. Fill pipeline_order, load a file with "
                "_load_csv, or use a class such as ScheduleInterleaved1F1B."
            )
        self._check_claims()
        return self._pipeline or self._make_pipeline()

    def _plan_order(self) -> None:
        """Make the schedule of a new order, where a client has given one or changed it."""
        if not self._order or self._order == self._planned:
            return
        if self._pipeline is not None and self._num_steps:
            raise ScheduleError(
                "pipeline_order was changed after the first step, in which the ranks agreed on "
                "it. Expected the same order in all steps: make a new schedule on all ranks."
            )
        plan = as_schedule(self._order, self._first.group_size, self.num_microbatches)
        plan.verify()
        check_fit(plan, self._held)
        self._plan, self._planned, self._pipeline = plan, copy_order(self._order), None

    def _make_pipeline(self) -> DropInPipeline:
        assert self._plan is not None
        options, plan = self._options, self._plan
        if self._limits is not None and isinstance(plan, Schedule):
            plan = self._limits.place(plan)
        self._pipeline = DropInPipeline(
            self._held,
            plan,
            num_microbatches=self.num_microbatches,
            num_steps_before=self._num_steps,
            **{field.name: getattr(options, field.name) for field in fields(options)},
        )
        for kind, function in self._functions.items():
            self._pipeline.register_custom_function(kind, function)
        if isinstance(self._plan, Schedule):
            set_ranks(self._held, dict(enumerate(self._plan.placement.ranks)))
        return self._pipeline


def _refuse_parts(stages: Sequence[PipelineStage], kind: str) -> None:
    """Raise an error for stages that say what to recompute: torch has no such action."""
    for stage in stages:
        if stage.recomputed:
            raise StageError(
                f"stage {stage.stage_index} has recomputed={stage.recomputed!r}, but {kind} never "
                "recomputes: its actions are torch's. Leave recomputed out, or use "
                "penstock.Pipeline with a schedule from add_recompute."
            )
