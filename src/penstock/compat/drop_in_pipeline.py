"""The pipeline behind the schedules of compat: it does what scripts for torch rely on."""

from dataclasses import replace
from typing import Any

import torch

from penstock.comm import AbstractComm, check_agreement
from penstock.compat.stage import note_step
from penstock.microbatches import merge_chunks
from penstock.microbatches.loss_weights import LossWeights
from penstock.runtime import Batch, Pipeline


class DropInPipeline(Pipeline):
    """A pipeline whose specs can be changed, and whose forwards can keep their graphs.

    `num_steps_before` counts the steps that this rank began with earlier pipelines of the same
    schedule, which failed. It must be the same on all ranks, so that they agree on what comes next.
    """

    def __init__(self, *args: Any, num_steps_before: int = 0, **options: Any) -> None:
        self._num_steps_before = num_steps_before
        super().__init__(*args, **options)
        self._settings = replace(self._settings, adds_losses=True)

    def set_specs(self, args: Any, kwargs: Any, outputs: Any) -> None:
        """Cut arguments and join outputs by these specs from the next step on."""
        self._specs = args, kwargs, outputs

    def prepare_step(self, *, has_backward: bool, reduces_grads: bool) -> None:
        """Set what the next step does besides its schedule.

        If it has no backward although it could, its outputs keep their graphs, if gradients are
        enabled. Gradients of sharded stages are reduced, or kept for a later step.
        """
        keeps = has_backward and not self._has_backward and torch.is_grad_enabled()
        known = self._settings
        if (keeps, reduces_grads) != (known.keeps_graphs, known.reduces_grads):
            self._settings = replace(known, keeps_graphs=keeps, reduces_grads=reduces_grads)

    def forget_forms(self) -> None:
        """Learn the shapes and dtypes of messages again in the next step; all ranks must."""
        self._runner.forget_forms()

    def run_whole(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        *,
        has_backward: bool,
    ) -> Any:
        """Run `step` or `eval`; stages may take keyword arguments that have the names of theirs."""
        trains = has_backward and self._has_backward
        return self._run(trains, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval_microbatches(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Run `eval` for a batch that is already cut; take and return what step_microbatches does.

        This rank forgets for the time of the step that it has a backward, as all others do.
        """
        had_backward, self._has_backward = self._has_backward, False
        try:
            return self.step_microbatches(*args, **kwargs)
        finally:
            self._has_backward = had_backward

    def merge(self, outputs: list[Any]) -> Any:
        """Join the outputs of all microbatches by the spec for outputs."""
        return merge_chunks(outputs, self._specs[2])

    def _run_batch(
        self,
        comm: AbstractComm,
        batch: Batch,
        loss_weights: LossWeights,
        has_backward: bool,
        losses: list[Any] | None,
        return_outputs: bool,
    ) -> list[Any] | None:
        note_step(self._stages, [], has_backward=has_backward)  # Frees the outputs of the last one.
        kept = losses if self._holds_last else None  # On other ranks, torch leaves the list alone.
        outputs = super()._run_batch(comm, batch, loss_weights, has_backward, kept, return_outputs)
        note_step(self._stages, outputs or [], has_backward=has_backward)
        return outputs

    def _meet(self, comm: AbstractComm) -> None:
        super()._meet(comm)
        counts = comm.gather(self._num_steps_before)
        check_agreement([{"the number of steps so far": count} for count in counts])
