"""A model that is spread over ranks, and behaves like a module with a step."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.comm.pipelines_together import Peers
from penstock.errors import (
    CheckpointError,
    GradientError,
    PartitionError,
    PretrainedError,
    StageError,
    StepError,
)
from penstock.ir import Rank, Schedule, StageId
from penstock.microbatches.merging import check_was_joined
from penstock.parallel.given_inputs import GivenInputs
from penstock.parallel.grad_scaler import GradScaler, scale_of
from penstock.parallel.memory_snapshots import Snapshots
from penstock.parallel.ranks_together import RanksTogether
from penstock.parallel.rebalancing import Recutting
from penstock.parallel.saved_folder import SavedModel, write_pretrained
from penstock.parallel.stage_names import StageNames
from penstock.parallel.trained_parameters import TrainedParameters
from penstock.parallel.training_state import Saving, TrainingState
from penstock.runtime import Pipeline
from penstock.runtime.bad_values.bad_value import BadValue
from penstock.runtime.step_settings import LossFn
from penstock.sealed import Sealed
from penstock.stage import PipelineStage
from penstock.stage.stage_checks import unwrapped
from penstock.timeline import Recording


class ParallelModel(Sealed):
    """A model spread over the ranks of a pipeline; `penstock.parallelize` makes it.

    Each rank has the parameters of its own stages, under the names that they have in the model.
    Every rank calls the same methods, with the same batch for all ranks of a pipeline; replicas
    have batches of their own.
    """

    settable = ("loss_fn",)

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        names: StageNames,
        inputs: GivenInputs,
        optimizers: Mapping[StageId, torch.optim.Optimizer],
        owns_group: bool,
        stays_in_eval: bool,
        saved: SavedModel | None,
        peers: Peers,
        recutting: Recutting | str,
    ) -> None:
        self._pipeline = pipeline
        self._saved = saved
        self._stays_in_eval = stays_in_eval
        self._ranks = RanksTogether(pipeline, peers)
        self._has_backward = pipeline.schedule.has_backward
        self._trained = TrainedParameters(self.stages.values())
        self._recutting = recutting
        self._writers: dist.ProcessGroup | None = None
        """The group for asynchronous saves, once there was one."""
        self._names = names
        self._inputs = inputs
        self._optimizers = dict(optimizers)
        self._owns_group = owns_group
        self._saving: Saving | None = None
        self._seal()

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs the steps."""
        return self._pipeline

    @property
    def stages(self) -> Mapping[StageId, PipelineStage]:
        """The stages that this rank holds, by their numbers."""
        return self._pipeline.stages

    @property
    def schedule(self) -> Schedule:
        """The schedule that the next step runs."""
        return self._pipeline.schedule

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches that a batch is cut into."""
        return self._pipeline.num_microbatches

    @property
    def rank(self) -> Rank:
        """This rank's number in its pipeline."""
        return self._first.group_rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the pipeline."""
        return self._first.group_size

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        return self._first.device

    @property
    def is_main(self) -> bool:
        """True on one rank among all, also with several replicas: the one to print and log on."""
        return self._ranks.is_first

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that step in the backward, one for each stage that has any."""
        return tuple(self._optimizers.values())

    @property
    def bad_value(self) -> BadValue | None:
        """The first value of the last step that was not finite; None without `bad_values`."""
        return self._pipeline.bad_value

    @property
    def loss_fn(self) -> LossFn | None:
        """The function that computes a microbatch's loss from its outputs and its target."""
        return self._pipeline.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: LossFn | None) -> None:
        self._pipeline.loss_fn = loss_fn

    def __repr__(self) -> str:
        held = ", ".join(map(str, self.stages))
        return (
            f"ParallelModel(rank {self.rank} of {self.num_ranks}, stages {held} of "
            f"{self._first.num_stages}, {self.num_microbatches} microbatches)"
        )

    # 1. Like a module.

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for its optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank with their names in the model.

        If two stages of this rank hold copies of one parameter, both are yielded: under different
        names if it has several, otherwise under the same one.
        """
        return self._names.parameters(self._modules)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages with their names in the model."""
        for module in self._modules:
            yield from module.named_buffers()

    @property
    def training(self) -> bool:
        """True if the stages are in training mode."""
        return self._first.submod.training

    def train(self, mode: bool = True) -> "ParallelModel":
        """Put this rank's stages into training mode, or into evaluation mode."""
        if mode and self._stays_in_eval:
            raise StageError(
                f"rank {self.rank}: the model was traced in evaluation mode, so dropout and norms "
                "stay in it. Call model.train() before parallelize()."
            )
        for stage in self.stages.values():
            stage.submod.train(mode)
        return self

    def eval(self) -> "ParallelModel":
        """Put this rank's stages into evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> "ParallelModel":
        """Say whether this rank's parameters are trained."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this rank's parameters, or set them to zero.

        Those that steps with `finalize=False` have left unreduced are dropped too, which
        `optimizer.zero_grad()` does not do for sharded parameters.
        """
        for stage in self.stages.values():
            stage.submod.zero_grad(set_to_none)
            stage.drop_unreduced_grads()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state dict.

        The parts of all ranks together are the whole, so torch.distributed.checkpoint can save
        and load this object as it is.
        """
        state: dict[str, Any] = {}
        for module in self._modules:
            state |= module.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a state dict of the model, or of what `state_dict` returns."""
        self._names.load(self._modules, state_dict, is_strict=strict)

    # 2. Steps.

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = False,
        finalize: bool = True,
        grad_scale: float = 1.0,
        scaler: GradScaler | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        work: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward and backward; return its mean loss, on every rank.

        The arguments are those of the model, for a whole batch, and `target` is what `loss_fn`
        compares the outputs with. `losses` gets the loss of each microbatch, on the rank of the
        last stage. With `return_outputs`, return the loss and the outputs, None on other ranks.

        To accumulate the gradients of several batches, give all steps but the last
        `finalize=False`, and all of them a `grad_scale` of one over their number: replicas then
        reduce gradients once. With a `scaler`, the gradients are multiplied by its scale. With
        `by_work`, give each microbatch's `work`, the same on all ranks.
        """
        if self.loss_fn is None:
            raise StepError(
                "this model was parallelized without a loss_fn, so there is nothing to train. "
                "Give parallelize() a loss_fn, or call predict()."
            )
        if not self._has_backward:
            raise StepError(
                "this model was parallelized with a schedule that has no backward, so there is "
                "nothing to train. Give parallelize() another, such as schedule='ZB-V', or call "
                "evaluate() or predict()."
            )
        if scaler is not None:
            self._check_not_in_backward("be unscaled")
            grad_scale *= scale_of(scaler, self)
        self._trained.check(self.rank, self.parameters(), self.optimizers)
        found: list[Any] = []
        args, kwargs = self._inputs.bind(args, kwargs)
        outputs = self._pipeline.step(
            *args,
            target=target,
            losses=found,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            finalize=finalize,
            grad_scale=grad_scale,
            work=work,
            **kwargs,
        )
        if scaler is not None and self.bad_value is not None:
            scaler.note_skipped()
        return self._result(found, losses, outputs, return_outputs)

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one batch forward only, in evaluation mode; take and return what `step` does.

        With replicas, all of them must call it: the loss is the mean over all their batches.
        """
        if self.loss_fn is None:
            raise StepError(
                "this model was parallelized without a loss_fn, so there is no loss to return. "
                "Give parallelize() a loss_fn, or call predict()."
            )
        found: list[Any] = []
        args, kwargs = self._inputs.bind(args, kwargs)
        with self._evaluating():
            outputs = self._pipeline.eval(
                *args,
                target=target,
                losses=found,
                return_outputs=return_outputs,
                loss_kwargs=loss_kwargs,
                over_replicas=True,
                **kwargs,
            )
        return self._result(found, losses, outputs, return_outputs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch forward only, in evaluation mode, without a loss.

        Return the outputs on the rank of the last stage, and None on the others.
        """
        args, kwargs = self._inputs.bind(args, kwargs)
        with self._evaluating():
            outputs = self._pipeline.eval(*args, **kwargs)
        check_was_joined(outputs, self.num_microbatches)
        return outputs

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of all stages by their global norm, and return that norm.

        All ranks must call it, after a step; all get the same norm, to the last bit.
        """
        self._check_not_in_backward("be clipped")
        return self._pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def recording(self) -> Recording:
        """Return the times of the last steps; `parallelize(..., record=True)` keeps them."""
        return self._pipeline.recording()

    def rebalance(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Move layers between ranks by how long their stages take now; return whether any moved.

        All ranks must call it, between steps, each with its optimizer, which is changed in place,
        or with None if there is none. Parameters that move are new objects on their new ranks.
        """
        self._finish_saving()
        if isinstance(self._recutting, str):
            raise PartitionError(
                f"rank {self.rank}: the layers of this model cannot be moved: {self._recutting}. "
                "Save a checkpoint, and load it with another cut."
            )
        done = self._recutting.rebalance(self._pipeline, optimizer)
        if done is not None:
            self._pipeline = done.pipeline
            self._ranks = RanksTogether(done.pipeline, self._ranks.peers)
            self._names = StageNames.of(done.pieces.modules)
        return done is not None

    # 3. Folders.

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Save the weights, the state of the optimizer, and `extra`, which JSON can hold.

        All ranks must call it. The folder is replaced once the new one is complete, and can be
        loaded by any number of ranks, with any schedule. With `asynchronous`, a copy is written
        while training goes on, unless ranks are threads; `wait()` of the result waits for the end.
        """
        self._finish_saving()
        writers = self._make_writers() if asynchronous and not self._ranks.are_threads else None
        saving = self._state(optimizer).save(_absolute(folder), extra or {}, writers)
        self._saving = saving if asynchronous else None
        return saving

    def load(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Load what `save` wrote into the stages and optimizers of all ranks; return its `extra`.

        All ranks must call it. If it fails, weights may have been loaded, but optimizers have not.
        """
        self._finish_saving()
        return self._state(optimizer).load(_absolute(folder))

    def snapshots(self, optimizer: torch.optim.Optimizer | None = None) -> Snapshots:
        """Return snapshots of this training in memory, which a killed rank does not take along."""
        return Snapshots(self._state(optimizer), self._ranks)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to a folder that `from_pretrained` of transformers loads.

        All ranks must call it, and each writes its own stages, to a folder that all of them share.
        The folder is replaced once the new one is complete; other files in it stay. Of a model with
        an adapter, only the adapter is written, as PEFT does it.
        """
        self._finish_saving()
        if self._saved is None:
            raise PretrainedError(
                "this model is not one of transformers or PEFT, which say how a folder is written. "
                "Save it with pipe.save(folder), or its parts of the state_dict() yourself."
            )
        write_pretrained(
            folder,
            self._saved,
            {i: unwrapped(stage.submod).state_dict() for i, stage in self.stages.items()},
            gather=self._ranks.gather,
            is_first=self._ranks.is_first,
            is_writer=self._ranks.is_writer,
        )

    def close(self) -> None:
        """End the connections to other ranks, and the process group if `parallelize` made it."""
        self._finish_saving()
        self._pipeline.close()
        if self._writers is not None and dist.is_initialized():
            dist.destroy_process_group(self._writers)
            self._writers = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "ParallelModel":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:  # Otherwise other ranks may never reach this.
            self.close()

    @property
    def _first(self) -> PipelineStage:
        return next(iter(self.stages.values()))

    @property
    def _modules(self) -> list[nn.Module]:
        return [unwrapped(stage.submod) for stage in self.stages.values()]

    def _state(self, optimizer: torch.optim.Optimizer | None) -> TrainingState:
        """Return what is saved or loaded."""
        if optimizer is not None and self._optimizers:
            raise StageError(
                "an optimizer was given, but this model has its own, which step in the backward. "
                "They are saved and loaded automatically: leave optimizer out."
            )
        optimizers = self.optimizers if optimizer is None else (optimizer,)
        return TrainingState(self._names, self._ranks, optimizers, self._pipeline.timeout_s)

    def _make_writers(self) -> dist.ProcessGroup:
        """Return a group of all ranks that write: it communicates while training does."""
        if self._ranks.processes() != list(range(dist.get_world_size())):
            raise CheckpointError(
                f"rank {self.rank}: asynchronous is True, but this model has only some of the "
                "processes, and torch makes a group for it on all or none. Leave asynchronous out."
            )
        if self._writers is None:
            timeout = timedelta(seconds=self._pipeline.timeout_s)
            self._writers = dist.new_group(timeout=timeout, backend="gloo")
        return self._writers

    def _check_not_in_backward(self, what: str) -> None:
        """Raise an error if optimizers have used the gradients before `what` can happen to them."""
        if self._optimizers:
            raise GradientError(
                f"rank {self.rank}: the optimizers step in the backward, before gradients can "
                f"{what}. Leave out optimizer_in_backward, and step an optimizer after the step."
            )

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def _result(
        self, found: list[Any], losses: list[Any] | None, outputs: Any, returns_outputs: bool
    ) -> Any:
        if losses is not None:
            losses[:] = found
        loss = self._pipeline.share_loss(found, over_replicas=True)
        if not returns_outputs:
            return loss
        check_was_joined(outputs, self.num_microbatches)
        return loss, outputs

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put all modules of this rank into evaluation mode, and back into the modes they had."""
        modules = [m for stage in self.stages.values() for m in stage.submod.modules()]
        modes = [module.training for module in modules]
        self.eval()
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


def _absolute(folder: str | Path) -> Path:
    return Path(os.path.abspath(folder))  # Without a slash at its end, or dots.
