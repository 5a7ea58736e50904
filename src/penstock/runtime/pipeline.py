"""The pipeline: stages, a schedule, and the steps that they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm import AbstractComm
from penstock.errors import StageError
from penstock.ir import Action, Schedule, StageId
from penstock.ir.action import COMPUTE_TYPES
from penstock.microbatches import merge_chunks
from penstock.microbatches.loss_weights import LossWeight, LossWeights, check_weights
from penstock.runtime import pipeline_checks as checks
from penstock.runtime.auto.auto_pilot import pilot_if_auto
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.bad_values.bad_value import BadValue
from penstock.runtime.bad_values.value_guard import BadValues, ValueGuard
from penstock.runtime.compiled_stages import compile_stages
from penstock.runtime.connection import PREPARING, Connection
from penstock.runtime.grad_norm import Clipping, measure_norm
from penstock.runtime.loss_line import LossLine
from penstock.runtime.losses import mean_of, weigh_losses
from penstock.runtime.microbatch_order import WorkOrder, as_given
from penstock.runtime.recording.pipeline_recorders import PipelineRecorders, check_has_steps
from penstock.runtime.recording.recorder import Recorder
from penstock.runtime.replicas import Replicas
from penstock.runtime.step_batches import cut_batch, take_microbatches
from penstock.runtime.step_runner import StepRunner, abandon_step
from penstock.runtime.step_settings import Batch, CustomFunction, LossFn, Settings
from penstock.sealed import Sealed
from penstock.stage import PipelineStage
from penstock.timeline import Recording

DEFAULT_TIMEOUT_S = 600.0


class Pipeline(Sealed):
    """A pipeline, which runs steps of any schedule on the stages that this rank holds.

    `schedule` is a Schedule, or the name of one (see `penstock.schedules.names()`), which needs
    `num_microbatches` too. Without a `loss_fn` there is no backward.

    `on_grads_ready(stage)` is called once per step and stage, as soon as the stage's gradients are
    complete; where parameters are tied to those of other stages, that is at the end of the step.

    With `scale_grads`, the loss of a step and its gradients are those of the whole batch:
    sum(w_i * loss_i) / sum(w_i), where w_i is the number of values that microbatch i's target has.
    `loss_weight(target)` is for a loss that is a mean over something else, such as the valid
    tokens: `lambda target: (target != -100).sum()`. The sums include all replicas, whose gradients
    are averaged afterwards: those of DistributedDataParallel around the last stage, or the ranks
    of `replica_group`. Without `scale_grads`, gradients are those of the plain sum of the losses.
    `loss_fn`, `scale_grads` and `loss_weight` can be set between steps.

    With the schedule "auto", or an `Auto(...)` with options, the first steps are measured. The
    other steps run the best schedule that is found for the stages as they are placed.

    With `by_work`, `step` takes the `work` of each microbatch, and the microbatches run in an order
    in which ranks wait less; losses and outputs come back in the order in which they were given.
    Stages draw random numbers and change buffers in the order in which microbatches run.

    With `bad_values`, a step whose loss or gradients are not finite is logged with where that began
    ("report"), loses its gradients on all ranks ("skip"), or is an error ("raise").
    With `compile`, the module of each stage is compiled in place, so that its backward can be
    split; `penstock.compile` is for parts of a stage, and takes options.
    With `record`, the times of the last steps are kept, and `recording()` returns them. With
    `record_memory`, the first step measures memory in place of its times.
    With `slow_when`, such as 0.5, ranks and links that become 50 % slower are named in the log.

    No wait lasts longer than `timeout` seconds. If any rank fails, all of them raise an error.
    """

    settable = ("loss_fn", "scale_grads", "loss_weight")

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule | str | Auto | AbstractPilot,
        *,
        num_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        loss_weight: LossWeight | None = None,
        replica_group: dist.ProcessGroup | DeviceMesh | None = None,
        on_grads_ready: Callable[[PipelineStage], None] | None = None,
        by_work: bool = False,
        bad_values: BadValues | None = None,
        compile: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        record: bool = False,
        record_memory: bool = False,
        slow_when: float | None = None,
    ) -> None:
        theirs = frozenset(self.__dict__)
        held = list(stages) if isinstance(stages, Sequence) else [stages]
        checks.check_stages(held)
        self._stages = {stage.stage_index: stage for stage in held}
        self._first = held[0]
        self._specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self._timeout_s = checks.check_timeout(timeout)
        self._settings = checks.check_settings(
            Settings(loss_fn, scale_grads, loss_weight, on_grads_ready, custom_functions={})
        )
        self._replicas = Replicas(
            self._stages,
            checks.check_replica_group(replica_group, self._settings),
            self._first.device,
            self._timeout_s,
        )
        self._recorders = PipelineRecorders.of(record=record, record_memory=record_memory)
        self._has_backward = loss_fn is not None
        schedule = pilot_if_auto(
            schedule, loss_fn is not None, self._timeout_s, self._replicas.find_peers
        )
        if isinstance(schedule, AbstractPilot):
            self.num_microbatches = checks.check_count(num_microbatches)
        else:
            schedule = checks.as_schedule(schedule, held, num_microbatches)
            checks.check_fit(schedule, held)
            self.num_microbatches = schedule.num_microbatches
            self._has_backward = self._has_backward and schedule.has_backward
        self._guard = ValueGuard.of(bad_values, self._settings, self._stages, self._replicas)
        self._runner = StepRunner(
            self._stages,
            schedule,
            self.num_microbatches,
            has_backward=self._has_backward,
            check_peers=self._replicas.check_recomputed,
            guard=self._guard,
            slow_when=slow_when,
        )
        self._connection = Connection(
            self._first.group,
            self._first.group_rank,
            self._first.device,
            self._timeout_s,
            self._meet,
            partial(abandon_step, self._stages),
        )
        self._loss_line = LossLine()
        self._order = WorkOrder(by_work, self._first.device)
        if compile:
            compile_stages(held)  # Last: where anything above raises, no module is changed.
        self._seal(theirs)

    @property
    def stages(self) -> Mapping[StageId, PipelineStage]:
        """The stages that this rank holds, by their numbers."""
        return MappingProxyType(self._stages)

    @property
    def timeout_s(self) -> float:
        """The seconds that no wait for another rank lasts longer than."""
        return self._timeout_s

    @property
    def loss_fn(self) -> LossFn | None:
        """The function that computes a microbatch's loss from its outputs and its target."""
        return self._settings.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: LossFn | None) -> None:
        checks.check_keeps_backward(self._settings.loss_fn, loss_fn)
        self._settings = checks.check_settings(replace(self._settings, loss_fn=loss_fn))

    @property
    def scale_grads(self) -> bool:
        """True if gradients are those of the mean over the batch, not of the sum of losses."""
        return self._settings.scale_grads

    @scale_grads.setter
    def scale_grads(self, scale_grads: bool) -> None:
        settings = checks.check_settings(replace(self._settings, scale_grads=scale_grads))
        checks.check_replica_group(self._replicas.given, settings)
        self._settings = settings

    @property
    def loss_weight(self) -> LossWeight | None:
        """The function from a microbatch's target to its weight in the mean over the batch."""
        return self._settings.loss_weight

    @loss_weight.setter
    def loss_weight(self, loss_weight: LossWeight | None) -> None:
        self._settings = checks.check_settings(replace(self._settings, loss_weight=loss_weight))

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        return self._runner.schedule

    @property
    def bad_value(self) -> BadValue | None:
        """The first value of the last step that was not finite; None without `bad_values`."""
        return None if self._guard is None else self._guard.last

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        finalize: bool = True,
        grad_scale: float = 1.0,
        work: Sequence[float] | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; return the outputs on the rank of the last stage.

        `args` are for the first stage, `kwargs` for the stages of this rank, `target` for the
        last stage; ranks that do not hold it need not give it. All are cut into microbatches.
        `losses` is filled with the loss of each microbatch, times its weight, so that their mean
        is the loss of the batch. `loss_kwargs` go to `loss_fn` uncut.

        With `finalize=False`, gradients are left for a later step to complete: replicas do not
        reduce them yet, and `on_grads_ready` is not called. `grad_scale` multiplies the gradients,
        and not the losses; it counts on the rank of the last stage.

        `work` is for pipelines with `by_work`: a number for each microbatch, such as its tokens,
        the same on all ranks.
        """
        checks.check_grad_scale(grad_scale)
        if finalize is not self._settings.is_final:
            self._settings = replace(
                self._settings, is_final=bool(finalize), reduces_grads=bool(finalize)
            )
        outputs = self._run(
            self._has_backward,
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            loss_kwargs,
            grad_scale=grad_scale,
            work=work,
            is_step=True,
        )
        if self._guard is not None:
            self._guard.check()
        return outputs

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        over_replicas: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward only, without gradients; take and return what `step` does.

        Losses are computed only if `losses` is given, so outputs alone need no `target`. With
        `over_replicas`, they are weighed over the batches of all replicas, as in `step`; all
        replicas must then call it.
        """
        return self._run(
            False,
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            loss_kwargs,
            over_replicas=over_replicas,
        )

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
        work: Sequence[float] | Tensor | None = None,
    ) -> list[Any] | None:
        """Run `step` for a batch that is already cut; the outputs are not merged either.

        `weights`, on the rank of the last stage, says how much each microbatch counts in the mean
        over the batch. By default `loss_weight` decides, or else the size of the microbatch.
        """
        self._recorders.join_block(self._gather)
        if not self._settings.is_final:
            self._settings = replace(self._settings, is_final=True, reduces_grads=True)
        with self._connection.failing_together(PREPARING) as comm:
            if weights is not None:
                checks.check_takes_weights("weights", self._settings)
            batch = take_microbatches(args, kwargs, targets, loss_kwargs, self.num_microbatches)
            batch = self._order.arrange(batch, comm, self.schedule.placement, work)
            if batch.order and weights is not None:
                known = check_weights(weights, self.num_microbatches)
                weights = [known[mb] for mb in batch.order]
            loss_weights = self._weigh_losses(
                batch, self._has_backward, weights=weights, are_cut=False
            )
            outputs = self._run_batch(
                comm, batch, loss_weights, self._has_backward, losses, return_outputs
            )
        if self._guard is not None:
            self._guard.check()
        return outputs

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of all stages by their global norm, and return that norm.

        All ranks must call it, after a step; all get the same norm, to the last bit. Parameters
        can be plain or DTensors; each counts once, however many ranks hold it or a part of it.
        """
        checks.check_grads_are_final(self._settings, self._first.group_rank)
        with self._connection.failing_together("in clipping the gradients") as comm:
            clipping = Clipping.of(max_norm, norm_type, error_if_nonfinite, foreach)
            norm = measure_norm(self._stages, comm, self._first.device, clipping, self._timeout_s)
        return norm.clip()

    def share_loss(self, losses: Sequence[Tensor], *, over_replicas: bool = False) -> Tensor:
        """Return the mean of a step's `losses`, which the rank of the last stage has, on all ranks.

        All ranks must call it, after a step. With `over_replicas`, it is the mean over all replicas
        too, which must all call it. It is a tensor of 64 bits, the same on all ranks.
        """
        with self._connection.failing_together("in sharing the loss") as comm:
            loss = torch.zeros(1, dtype=torch.float64, device=self._first.device)
            if self._holds_last:
                loss += mean_of(losses)
                if over_replicas:
                    self._replicas.average_(loss)
            return self._loss_line.pass_on(comm, self.schedule.placement.ranks[-1], loss)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, on every rank. All ranks must call it.

        `what` says what they gather for, in error messages.
        """
        with self._connection.failing_together(f"in waiting for others: {what}") as comm:
            return comm.gather(value, what)

    def recording(self) -> Recording:
        """Return the last steps, at most 100, with the times of all ranks on one clock.

        All ranks must call it, after the same step.
        """
        return self._gather(self._recorders.own)

    def _gather(self, recorder: Recorder) -> Recording:
        check_has_steps(recorder)
        with self._connection.failing_together("in gathering a recording") as comm:
            return recorder.gather(
                comm, self._first.device, self.schedule.placement, self.num_microbatches
            )

    def close(self) -> None:
        """End the connections to other ranks now; otherwise they end with the last reference."""
        self._loss_line.finish()
        self._order.finish()
        self._connection.close()

    def register_custom_function(self, kind: type[Action], function: CustomFunction) -> None:
        """Call `function(action, context)` instead of running each action of type `kind`.

        `context.run(action)` runs the action, or one half of an overlap, and must be called.
        `context.stages` and `context.batch` are the stages and the batch of the step. The halves
        of an overlap do not count as actions of their own kinds, and a compiled stage runs
        Backward where others run BackwardInput.
        """
        if kind not in COMPUTE_TYPES:
            names = ", ".join(known.__name__ for known in COMPUTE_TYPES)
            raise StageError(f"kind is {kind!r}. Expected one of penstock.ir's {names}.")
        functions = {**self._settings.custom_functions, kind: function}
        self._settings = replace(self._settings, custom_functions=functions)

    def _run(
        self,
        has_backward: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        grad_scale: float = 1.0,
        over_replicas: bool = False,
        work: Sequence[float] | Tensor | None = None,
        is_step: bool = False,
    ) -> Any:
        args_spec, kwargs_spec, merge_spec = self._specs
        self._recorders.join_block(self._gather)
        with self._connection.failing_together(PREPARING) as comm:
            is_first = 0 in self._stages
            batch = cut_batch(
                args if is_first else (),
                kwargs,
                target if self._holds_last else None,
                loss_kwargs,
                self.num_microbatches,
                args_spec if is_first else None,
                kwargs_spec,
            )
            if is_step:
                batch = self._order.arrange(batch, comm, self.schedule.placement, work)
            loss_weights = LossWeights.alike(self.num_microbatches)
            if has_backward or losses is not None:
                loss_weights = self._weigh_losses(
                    batch, has_backward or over_replicas, weights=None, are_cut=True
                ).scaled(grad_scale)
            outputs = self._run_batch(
                comm, batch, loss_weights, has_backward, losses, return_outputs
            )
            return None if outputs is None else merge_chunks(outputs, merge_spec)

    def _weigh_losses(
        self, batch: Batch, over_replicas: bool, *, weights: Any, are_cut: bool
    ) -> LossWeights:
        """Find out how much each microbatch counts; only the rank of the last stage uses it."""
        if not self.scale_grads:
            return LossWeights.plain(self.num_microbatches)
        if not self._holds_last or self.loss_fn is None:
            return LossWeights.alike(self.num_microbatches)
        return weigh_losses(
            batch,
            self.num_microbatches,
            loss_fn=self.loss_fn,
            weights=weights,
            rule=self.loss_weight,
            are_cut=are_cut,
            sum_over=self._replicas.sum_over if over_replicas else None,
        )

    def _run_batch(
        self,
        comm: AbstractComm,
        batch: Batch,
        loss_weights: LossWeights,
        has_backward: bool,
        losses: list[Any] | None,
        return_outputs: bool,
    ) -> list[Any] | None:
        if has_backward:
            checks.check_grad_is_enabled()
        step = self._runner.run(
            comm,
            batch,
            self._settings,
            loss_weights,
            has_backward=has_backward,
            keeps_outputs=return_outputs and self._holds_last,
            needs_losses=has_backward or losses is not None,
            recorders=self._recorders.active,
        )
        if losses is not None:
            found = step.losses.weighed()
            losses[:] = as_given(found, batch.order) if found else found
        outputs = [step.outputs[mb] for mb in sorted(step.outputs)]
        return as_given(outputs, batch.order) if step.keeps_outputs else None

    def _meet(self, comm: AbstractComm) -> None:
        """Check that all ranks have the same pipeline, and open the channels."""
        own = {
            "num_stages": self._first.num_stages,
            "num_microbatches": self.num_microbatches,
            "loss_fn": "none" if self._settings.loss_fn is None else "given",
            "the cut": self._first.cut or "none",
            "record": bool(self._recorders.active),
            "by_work": self._order.is_by_work,
            "bad_values": self._guard and self._guard.bad_values,
        }
        ranks = comm.gather(self._runner.facts(own))
        self._runner.agree(comm, ranks)
        is_reduced = any(rank.is_reduced for rank in ranks)
        if self._has_backward and self.scale_grads and self._holds_last and is_reduced:
            checks.check_replicas_are_known(self._replicas.groups)
        self._runner.meet(comm, ranks)

    @property
    def _holds_last(self) -> bool:
        return self._first.num_stages - 1 in self._stages
