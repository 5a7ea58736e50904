"""The base of torch's schedules: steps of stages in an order, run by a pipeline of Penstock."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from penstock.compat.actions import _ComputationType
from penstock.compat.beside_torch import Beside, compare_step
from penstock.compat.custom_functions import as_own_function, kind_of
from penstock.compat.drop_in_pipeline import DropInPipeline
from penstock.compat.schedule_state import ScheduleState
from penstock.compat.step_arguments import Given


class _PipelineSchedule(ScheduleState):
    """The stages of this rank and their schedule, with steps that are called as torch's are."""

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
        Unless `finalize_gradients`, the gradients of FSDP2 stages are kept unreduced, and the next
        step with it reduces their sum; those of other stages are complete after each step.
        """
        given = Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs, finalize_gradients)
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
        if not given.finalizes:
            sys.stderr.write(
                f"penstock: rank {self._first.group_rank}, {type(self).__name__}: not compared, as "
                "the first step has finalize_gradients=False and leaves gradients unreduced\n"
            )
            return run_own()
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
        with self._running(has_backward=has_backward, finalizes=given.finalizes) as pipeline:
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
            return pipeline.run_whole(
                given.args,
                given.kwargs,
                given.target,
                losses,
                return_outputs,
                loss_kwargs,
                has_backward=has_backward,
            )

    @contextmanager
    def _running(self, *, has_backward: bool, finalizes: bool = True) -> Iterator[DropInPipeline]:
        """Yield the pipeline for one step; after an error, the next step makes a new one."""
        pipeline = self._ready()
        pipeline.prepare_step(has_backward=has_backward, reduces_grads=finalizes)
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
        pipeline = self._ready()
        try:
            return pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)
        except BaseException:
            self._pipeline = None  # It has ended on all ranks: the next step makes a new one.
            raise

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
