"""The bases of torch's schedules: stages and an order, which a pipeline of Penstock runs."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, ClassVar

from torch import Tensor

from penstock.compat.actions import Order, _ComputationType, as_order, as_schedule, copy_order
from penstock.compat.beside_torch import Beside, compare_step
from penstock.compat.custom_functions import as_own_function, kind_of
from penstock.compat.drop_in_pipeline import DropInPipeline
from penstock.compat.stage import ranks_known_to, set_ranks
from penstock.compat.step_arguments import Given, Options
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


class _PipelineSchedule(Sealed):
    """The stages of this rank and their schedule, under the names that torch uses.

    A pipeline runs the steps. It is made when the order is known, and made again after a step
    that failed on all ranks, so that the schedule stays usable.
    """

    settable = ("loss_fn", "scale_grads", "loss_weight")
    schedule_name: ClassVar[str]
    """The name of the schedule; bases and classes without a fixed order have none."""

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

    # 3. Steps.

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; return the outputs on the rank of the last stage.

        `arg_mbs`, `kwarg_mbs` and `target_mbs` are for a batch that is already cut. Without a
        loss_fn there is no backward, and outputs keep their graphs where gradients are enabled.
        `finalize_gradients` must be True: each step scales and reduces its own gradients, and
        adds them to those of earlier steps.
        """
        if not finalize_gradients:
            raise StageError(
                "finalize_gradients is False, but here each step scales and reduces its own "
                "gradients. Leave it out: over several steps, the sum is the same."
            )
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run_given(given, losses, return_outputs, loss_kwargs, has_backward=True)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward only, without gradients; take and return what `step` does."""
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run_given(given, losses, return_outputs, loss_kwargs, has_backward=False)

    def step_microbatches(
        self,
        args: list[tuple[Any, ...]] | None = None,
        kwargs: list[dict[str, Any]] | None = None,
        *,
        targets: list[Any] | None = None,
        weights: Sequence[float] | Tensor | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | None:
        """Run `step` for a batch that is already cut, as `penstock.Pipeline` does."""
        with self._running(has_backward=True) as pipeline:
            return pipeline.step_microbatches(
                args,
                kwargs,
                targets=targets,
                weights=weights,
                losses=losses,
                return_outputs=return_outputs,
                loss_kwargs=loss_kwargs,
            )

    def _step_microbatches(
        self,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run a batch that is already cut; the outputs are in `output_chunks` of the last stage."""
        self.step_microbatches(
            arg_mbs,
            kwarg_mbs,
            targets=target_mbs,
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
        )

    def _run_given(
        self,
        given: Given,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        has_backward: bool,
    ) -> Any:
        given.check()
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses is a {type(losses).__name__}. Expected a list to fill.")

        def run_own() -> Any:
            return self._run_own(given, losses, return_outputs, loss_kwargs, has_backward)

        if not (self._compares and has_backward and self._has_backward):
            return run_own()
        self._compares = False
        kept: list[Any] | None = None if losses is None else []
        return compare_step(
            self._beside_torch(),
            (given.args, given.kwargs, given.arg_mbs, given.kwarg_mbs),
            lambda theirs: theirs.step(
                *given.args,
                target=given.target,
                losses=kept,
                return_outputs=False,
                loss_kwargs=loss_kwargs,
                **given.as_keywords(),
            ),
            run_own,
        )

    def _beside_torch(self) -> Beside:
        """Return what torch's own schedule is made of, to compare a step with it."""
        self._ready()
        return Beside(
            type(self).__name__,
            self._held,
            self.pipeline_order,
            self.num_microbatches,
            {
                "loss_fn": self._options.loss_fn,
                "output_merge_spec": self._options.output_merge_spec,
                "scale_grads": self._options.scale_grads,
                **{
                    name: spec
                    for name in ("args_chunk_spec", "kwargs_chunk_spec")
                    if (spec := getattr(self._options, name)) is not None
                },
            },
        )

    def _run_own(
        self,
        given: Given,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        has_backward: bool,
    ) -> Any:
        with self._running(has_backward=has_backward) as pipeline:
            if given.is_cut:
                run_cut = pipeline.step_microbatches if has_backward else pipeline.eval_microbatches
                outputs = run_cut(
                    given.arg_mbs,
                    given.kwarg_mbs,
                    targets=given.target_mbs,
                    losses=losses,
                    return_outputs=return_outputs,
                    loss_kwargs=loss_kwargs,
                )
                return None if outputs is None else pipeline.merge(outputs)
            run = pipeline.step if has_backward else pipeline.eval
            return run(
                *given.args,
                target=given.target,
                losses=losses,
                return_outputs=return_outputs,
                loss_kwargs=loss_kwargs,
                **given.kwargs,
            )

    @contextmanager
    def _running(self, *, has_backward: bool) -> Iterator[DropInPipeline]:
        """Yield the pipeline for one step; after an error, the next step makes a new one."""
        pipeline = self._ready()
        pipeline.keep_graphs(has_backward)
        self._num_steps += 1
        try:
            yield pipeline
        except BaseException:
            self._pipeline = None
            raise
        self._trained = has_backward and self._has_backward

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of all stages by their global norm, as `penstock.Pipeline` does."""
        return self._ready().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def close(self) -> None:
        """End the connections to other ranks now; otherwise they end with the last reference."""
        if self._pipeline is not None:
            self._pipeline.close()

    def register_custom_function(
        self, computation_type: Any, custom_function: Callable[..., None]
    ) -> None:
        """Call a function instead of running each action of a type.

        With one of torch's constants, such as FORWARD, the function gets torch's action and
        context. It runs the action by `forward_one_chunk`, `backward_one_chunk` or
        `backward_weight_one_chunk` of its stage. With one of Penstock's types of actions, it is as
        for `penstock.Pipeline`.
        """
        kind = kind_of(computation_type)
        function = (
            as_own_function(custom_function, self)
            if isinstance(computation_type, _ComputationType)
            else custom_function
        )
        if self._pipeline is not None:
            self._pipeline.register_custom_function(kind, function)
        self._functions[kind] = function

    # 4. The pipeline.

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
        options = self._options
        self._pipeline = DropInPipeline(
            self._held,
            self._plan,
            num_microbatches=self.num_microbatches,
            num_steps_before=self._num_steps,
            **{field.name: getattr(options, field.name) for field in fields(options)},
        )
        for kind, function in self._functions.items():
            self._pipeline.register_custom_function(kind, function)
        if isinstance(self._plan, Schedule):
            set_ranks(self._held, dict(enumerate(self._plan.placement.ranks)))
        return self._pipeline
