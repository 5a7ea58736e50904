"""The pipeline: stages, a schedule, and the steps that they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm import AbstractComm
from penstock.comm.pipelines_together import Peers
from penstock.errors import GradientError, RecordError, StageError, StepError
from penstock.ir import Action, Schedule, StageId
from penstock.ir.action import COMPUTE_TYPES
from penstock.microbatches import merge_chunks, split_args_kwargs_into_chunks
from penstock.microbatches.loss_weights import (
    LossWeight,
    LossWeights,
    average_over_replicas_,
    sum_over_replicas,
)
from penstock.microbatches.splitting import split_target
from penstock.runtime.auto.auto_pilot import AutoPilot
from penstock.runtime.auto.auto_value import Auto
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.compiled_stages import compile_stages
from penstock.runtime.connection import Connection
from penstock.runtime.grad_norm import Clipping, measure_norm
from penstock.runtime.loss_line import LossLine
from penstock.runtime.losses import weigh_losses
from penstock.runtime.pipeline_checks import (
    as_schedule,
    check_count,
    check_fit,
    check_grad_scale,
    check_microbatches,
    check_replica_group,
    check_replicas_are_known,
    check_same_replicas,
    check_settings,
    check_stages,
    check_takes_weights,
    check_timeout,
)
from penstock.runtime.recording.recorded_block import active_run
from penstock.runtime.recording.recorder import Recorder
from penstock.runtime.step_runner import StepRunner
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

    With `compile`, the module of each stage is compiled in place, so that its backward can be
    split; `penstock.compile` is for parts of a stage, and takes options.

    With `record`, the times of the last steps are kept, and `recording()` returns them. With
    `record_memory`, the first step measures memory in place of its times.

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
        compile: bool = False,
        timeout: float = DEFAULT_TIMEOUT_S,
        record: bool = False,
        record_memory: bool = False,
    ) -> None:
        theirs = frozenset(self.__dict__)
        held = list(stages) if isinstance(stages, Sequence) else [stages]
        check_stages(held)
        self._stages = {stage.stage_index: stage for stage in held}
        self._first = held[0]
        self._specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        self._timeout_s = check_timeout(timeout)
        self._settings = check_settings(
            Settings(loss_fn, scale_grads, loss_weight, on_grads_ready, custom_functions={})
        )
        self._replica_group = check_replica_group(replica_group, self._settings)
        record = record or record_memory
        self._recorders = [Recorder(counts_memory=record_memory)] if record else []
        """The pipeline's own recorder first, if it has one; then those of recorded blocks."""
        self._records = record
        self._has_backward = loss_fn is not None
        if isinstance(schedule, str) and schedule.lower() == "auto":
            schedule = Auto()
        if isinstance(schedule, Auto):
            if loss_fn is None:
                raise StageError(
                    'schedule is "auto", which needs a loss_fn: without a backward there is '
                    "nothing to plan. Give one, or the name of a schedule."
                )
            schedule = AutoPilot(schedule, self._timeout_s, self._find_peers)
        if isinstance(schedule, AbstractPilot):
            self.num_microbatches = check_count(num_microbatches)
        else:
            schedule = as_schedule(schedule, held, num_microbatches)
            check_fit(schedule, held)
            self.num_microbatches = schedule.num_microbatches
            self._has_backward = self._has_backward and schedule.has_backward
        self._runner = StepRunner(
            self._stages, schedule, self.num_microbatches, has_backward=self._has_backward
        )
        self._connection = Connection(
            self._first.group,
            self._first.group_rank,
            self._first.device,
            self._timeout_s,
            self._meet,
            self._abandon,
        )
        self._loss_line = LossLine()
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
        if (loss_fn is None) != (self._settings.loss_fn is None):
            had, gets = ("a loss_fn", "none") if loss_fn is None else ("no loss_fn", "one")
            raise StageError(
                f"the pipeline was made with {had} and would now have {gets}. All ranks have "
                "agreed whether there is a backward: set another loss_fn, call eval() for steps "
                "without a backward, or make a new pipeline."
            )
        self._settings = check_settings(replace(self._settings, loss_fn=loss_fn))

    @property
    def scale_grads(self) -> bool:
        """True if gradients are those of the mean over the batch, not of the sum of losses."""
        return self._settings.scale_grads

    @scale_grads.setter
    def scale_grads(self, scale_grads: bool) -> None:
        settings = check_settings(replace(self._settings, scale_grads=scale_grads))
        check_replica_group(self._replica_group, settings)
        self._settings = settings

    @property
    def loss_weight(self) -> LossWeight | None:
        """The function from a microbatch's target to its weight in the mean over the batch."""
        return self._settings.loss_weight

    @loss_weight.setter
    def loss_weight(self, loss_weight: LossWeight | None) -> None:
        self._settings = check_settings(replace(self._settings, loss_weight=loss_weight))

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        return self._runner.schedule

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        finalize: bool = True,
        grad_scale: float = 1.0,
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
        """
        check_grad_scale(grad_scale)
        if finalize is not self._settings.is_final:
            self._settings = replace(
                self._settings, is_final=bool(finalize), reduces_grads=bool(finalize)
            )
        return self._run(
            self._has_backward,
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            loss_kwargs,
            grad_scale=grad_scale,
        )

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
    ) -> list[Any] | None:
        """Run `step` for a batch that is already cut; the outputs are not merged either.

        `weights`, on the rank of the last stage, says how much each microbatch counts in the mean
        over the batch. By default `loss_weight` decides, or else the size of the microbatch.
        """
        self._join_run()
        if not self._settings.is_final:
            self._settings = replace(self._settings, is_final=True, reduces_grads=True)
        with self._connection.failing_together() as comm:
            if weights is not None:
                check_takes_weights("weights", self._settings)
            batch = Batch(
                check_microbatches("args", args, tuple, self.num_microbatches),
                check_microbatches("kwargs", kwargs, dict, self.num_microbatches),
                []
                if targets is None
                else check_microbatches("targets", targets, object, self.num_microbatches),
                loss_kwargs or {},
            )
            loss_weights = self._weigh_losses(
                batch, self._has_backward, weights=weights, are_cut=False
            )
            return self._run_batch(
                comm, batch, loss_weights, self._has_backward, losses, return_outputs
            )

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
        if not self._settings.is_final:  # On all ranks alike, so the pipeline can go on.
            raise GradientError(
                f"rank {self._first.group_rank}: the last step had finalize=False, so gradients "
                "are not complete, and their norm is not known. Clip after a step that finalizes "
                "them."
            )
        with self._connection.failing_together() as comm:
            clipping = Clipping.of(max_norm, norm_type, error_if_nonfinite, foreach)
            norm = measure_norm(self._stages, comm, self._first.device, clipping, self._timeout_s)
        return norm.clip()

    def share_loss(self, losses: Sequence[Tensor], *, over_replicas: bool = False) -> Tensor:
        """Return the mean of a step's `losses`, which the rank of the last stage has, on all ranks.

        All ranks must call it, after a step. With `over_replicas`, it is the mean over all replicas
        too, which must all call it. It is a tensor of 64 bits, the same on all ranks.
        """
        with self._connection.failing_together() as comm:
            loss = torch.zeros(1, dtype=torch.float64, device=self._first.device)
            if self._holds_last:
                found = torch.stack([each.detach().reshape(()) for each in losses])
                loss += found.mean(dtype=torch.promote_types(found.dtype, torch.float32))
                for replicas in self._replicas if over_replicas else ():
                    average_over_replicas_(loss, replicas, self._timeout_s)
            return self._loss_line.pass_on(comm, self.schedule.placement.ranks[-1], loss)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, on every rank. All ranks must call it.

        `what` says what they gather for, in error messages.
        """
        with self._connection.failing_together() as comm:
            return comm.gather(value, what)

    def recording(self) -> Recording:
        """Return the last steps, at most 100, with the times of all ranks on one clock.

        All ranks must call it, after the same step.
        """
        if not self._records:
            raise RecordError(
                "this pipeline does not record its steps. Make it with record=True, or run its "
                "steps in a `with penstock.record() as run:` block."
            )
        return self._gather(self._recorders[0])

    def _gather(self, recorder: Recorder) -> Recording:
        if recorder.is_empty:
            raise RecordError(
                "no step has been recorded yet. Run one before asking for the recording, or two if "
                'the first counts memory, as it does with record_memory and the schedule "auto".'
            )
        with self._connection.failing_together() as comm:
            return recorder.gather(
                comm, self._first.device, self.schedule.placement, self.num_microbatches
            )

    def close(self) -> None:
        """End the connections to other ranks now; otherwise they end with the last reference."""
        self._loss_line.finish()
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
    ) -> Any:
        args_spec, kwargs_spec, merge_spec = self._specs
        self._join_run()
        with self._connection.failing_together() as comm:
            args_split, kwargs_split = split_args_kwargs_into_chunks(
                args if 0 in self._stages else (),
                kwargs,
                self.num_microbatches,
                args_spec if 0 in self._stages else None,
                kwargs_spec if kwargs else None,
            )
            targets: list[Any] = []
            if target is not None and self._holds_last:
                targets = split_target(target, self.num_microbatches)
            batch = Batch(args_split, kwargs_split, targets, loss_kwargs or {})
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
            weights=weights,
            rule=self.loss_weight,
            are_cut=are_cut,
            sum_over=self._sum_over_replicas if over_replicas else None,
        )

    def _sum_over_replicas(self, total: float) -> tuple[float, int]:
        """Return the sum of all replicas' totals, and how many replicas there are."""
        num_replicas = 1
        for replicas in self._replicas:
            total = sum_over_replicas(total, replicas, self._first.device, self._timeout_s)
            num_replicas *= dist.get_world_size(replicas)
        return total, num_replicas

    @property
    def _replicas(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks that hold the last stage of each replica, by dimension of their mesh."""
        last = self._stages[self._first.num_stages - 1]
        last.refresh()  # It may have been wrapped since the last step.
        if self._replica_group is None:
            return last.replica_groups
        if averaging := last.known_replica_groups:
            check_same_replicas(self._replica_group, averaging)
        return (self._replica_group,)

    def _find_peers(self) -> Peers:
        """Return the ranks that take part in collectives of this rank's stages."""
        groups = [group for stage in self._stages.values() for group in stage.peer_groups]
        given = self._replica_group
        if given is not None and dist.get_rank(given) >= 0:
            groups.append(given)
        return Peers.of(groups, self._first.device, self._timeout_s)

    def _run_batch(
        self,
        comm: AbstractComm,
        batch: Batch,
        loss_weights: LossWeights,
        has_backward: bool,
        losses: list[Any] | None,
        return_outputs: bool,
    ) -> list[Any] | None:
        if has_backward and not torch.is_grad_enabled():
            raise StepError(
                "step() was called where gradients are disabled, so there would be no backward. "
                "Call it outside of torch.no_grad(), or call eval()."
            )
        step = self._runner.run(
            comm,
            batch,
            self._settings,
            loss_weights,
            has_backward=has_backward,
            keeps_outputs=return_outputs and self._holds_last,
            needs_losses=has_backward or losses is not None,
            recorders=self._recorders,
        )
        if losses is not None:
            losses[:] = step.losses.weighed()
        return [step.outputs[mb] for mb in sorted(step.outputs)] if step.keeps_outputs else None

    def _abandon(self, error: BaseException) -> None:
        """Shard parameters again after a failure; a fault in that must not hide the first one."""
        for index, stage in self._stages.items():
            try:
                stage.abandon_step()
            except Exception as another:
                error.add_note(
                    f"the parameters of stage {index} could not be sharded again after it: "
                    f"{type(another).__name__}: {another}"
                )

    def _join_run(self) -> None:
        """Let the recorded block that this step is in, if any, record it."""
        if (run := active_run()) is not None:
            run.watch(self._recorders, self._gather)

    def _meet(self, comm: AbstractComm) -> None:
        """Check that all ranks have the same pipeline, and open the channels."""
        own = {
            "num_stages": self._first.num_stages,
            "num_microbatches": self.num_microbatches,
            "loss_fn": "none" if self._settings.loss_fn is None else "given",
            "the cut": self._first.cut or "none",
            "record": bool(self._recorders),
        }
        ranks = comm.gather(self._runner.facts(own))
        self._runner.agree(comm, ranks)
        is_reduced = any(rank.is_reduced for rank in ranks)
        if self._has_backward and self.scale_grads and self._holds_last and is_reduced:
            check_replicas_are_known(self._replicas)
        self._runner.meet(comm, ranks)

    @property
    def _holds_last(self) -> bool:
        return self._first.num_stages - 1 in self._stages
