"""The trainer: the work of each rank from the first step to the last."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.comm import AbstractComm, check_agreement
from penstock.errors import OptionError
from penstock.ir import Schedule
from penstock.parallel import ParallelModel
from penstock.stage import Group
from penstock.timeline.recording import Recording
from penstock.training.choices import Data
from penstock.training.connected_ranks import connected
from penstock.training.exporting import export
from penstock.training.forecast import Forecast
from penstock.training.held_out import Evaluated, Evaluation
from penstock.training.loader import Batches, Sequences, generator_for
from penstock.training.models import Place, as_inputs, spread
from penstock.training.optimisation import make_optimizer, set_rates
from penstock.training.orders import choose_orders
from penstock.training.sampling import continue_text
from penstock.training.saved import (
    Saved,
    check_same,
    find_latest,
    kept_from_others,
    remove_old,
    step_folder,
)
from penstock.training.settings import TrainConfig
from penstock.training.tokens import choose_tokens, tokenise
from penstock.training.watching import Seen, watch


@dataclass(frozen=True, slots=True)
class StepDone:
    """A finished step, as rank 0 reports it."""

    step: int
    """The number of the step, from 1 on."""
    loss: float
    """The mean over the microbatches, before the weights changed."""
    duration_s: float
    tokens_per_s: float
    lr: float = 0.0
    grad_norm: float | None = None
    """The norm of all gradients before they were clipped; None if they were not."""
    seen: Seen | None = None
    """What was measured besides, in some of the steps."""
    skipped: str = ""
    """Why the weights were left as they were; empty if they were not."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run."""

    steps: tuple[StepDone, ...]
    """The finished steps on rank 0; empty on other ranks."""
    schedule: Schedule
    """The schedule that the next step would run."""
    evaluated: tuple[Evaluated, ...] = ()
    sample: str = ""
    """The text that the model makes of the prompt, if there was one."""

    @property
    def tokens_per_s(self) -> float:
        """The median over the steps."""
        return statistics.median(done.tokens_per_s for done in settled(self.steps))


def settled(steps: Sequence[StepDone]) -> Sequence[StepDone]:
    """Return the steps without the first, in which the ranks connect, unless it is the only one."""
    return steps[1:] or steps


def train(
    config: TrainConfig,
    data: Data,
    *,
    group: Group = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[StepDone], None] = lambda done: None,
    on_evaluated: Callable[[Evaluated], None] = lambda found: None,
    on_forecast: Callable[[Forecast], None] = lambda found: None,
) -> Trained:
    """Train a model; every rank calls this with the same config and data.

    The ranks are those of `group`, as for a PipelineStage. `on_forecast` is called on rank 0
    before the first step, `on_step` and `on_evaluated` after each step and evaluation.
    """
    with connected(group, torch.device(device)) as comm:
        if comm.num_ranks != config.num_processes:
            raise OptionError(
                f"--ranks is {config.num_ranks}, for {config.num_processes} processes in all, but "
                f"there are {comm.num_ranks}. Give that number."
            )
        facts = {"the config": config, "the data": data.documents.digest}
        check_agreement(comm.gather(facts, "to begin the training"))
        with kept_from_others(config.checkpoint) if comm.rank == 0 else nullcontext():
            is_told = comm.rank == 0 and not config.evaluate_only
            tell = on_forecast if is_told else lambda found: None
            run = RankTraining(config, data, comm, group, torch.device(device), tell)
            steps, evaluated = [], []
            last = run.first if config.evaluate_only else config.steps
            for number in range(run.first + 1, last + 1):
                done = run.step(number)
                done = replace(done, seen=watch(run.pipe, config, number))
                if comm.rank == 0:
                    steps.append(done)
                    on_step(done)
                if run.is_to_be_evaluated(number):
                    evaluated.append(run.evaluate(number, on_evaluated))
            if config.evaluate_only:
                evaluated.append(run.evaluate(run.first, on_evaluated))
            sample = run.continue_text() if config.sample else ""
            if config.export:
                export(run.pipe, config, is_first=comm.rank == 0)
            run.finish()
        return Trained(tuple(steps), run.pipe.schedule, tuple(evaluated), sample)


class RankTraining:
    """One rank's part of the model, with the optimizer and batches to train it."""

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        comm: AbstractComm,
        group: Group,
        device: torch.device,
        on_forecast: Callable[[Forecast], None] = lambda found: None,
    ) -> None:
        self._config, self._comm = config, comm
        self._saved = Saved.of(config, data.documents)
        self._place = Place.of(config, group, device)
        self._tokens = choose_tokens(config)
        self._prompt = self._tokens.encode(config.sample.encode())
        if config.sample and not self._prompt:
            raise OptionError(f"--sample is {config.sample!r}, which has no tokens. Give a text.")
        trained, self._evaluation = self._read(data)
        self._batches = Batches(trained, batch=config.batch, seed=config.seed)
        self.pipe: ParallelModel = spread(config, choose_orders(config), self._place, on_forecast)
        self._optimizer = make_optimizer(self.pipe.parameters(), config)
        keeps = config.snapshot_every is not None and not config.evaluate_only
        self._snapshots = self.pipe.snapshots(self._optimizer) if keeps else None
        self.first = self._resume(data)
        self._num_skipped = 0

    def _read(self, data: Data) -> tuple[Sequences, Evaluation | None]:
        config = self._config
        known = config.model.vocabulary
        row = tokenise(data.documents, self._tokens, vocabulary=known)
        whole, held_out = Sequences(row, config.context), None
        if data.evaluated is not None:
            row = tokenise(data.evaluated, self._tokens, vocabulary=known)
            held_out = Sequences(row, config.context)
        elif config.eval_share:
            whole, held_out = whole.split(config.eval_share)
        return whole, self._evaluate_on(held_out)

    def _evaluate_on(self, held_out: Sequences | None) -> Evaluation | None:
        if held_out is None:
            return None
        return Evaluation(held_out, self._config.batch, self._config.eval_batches)

    def _resume(self, data: Data) -> int:
        """Load the last snapshot or checkpoint, whichever is later; return its step, or 0."""
        config, folder = self._config, Path(self._config.checkpoint)
        found = find_latest(folder) if config.resume else None
        if found is not None:
            check_same(found, config, data.documents)
        saved_step = 0 if found is None else found.step
        if self._snapshots is not None:
            restored = self._snapshots.restore(after=saved_step)
            if restored is not None:
                return restored[0]
        if found is not None:
            is_trained = found.step < config.steps and not config.evaluate_only
            self.pipe.load(step_folder(folder, found.step), self._optimizer if is_trained else None)
        return saved_step

    def step(self, number: int) -> StepDone:
        """Run one step, and save a checkpoint if one is due."""
        config, began_s = self._config, time.perf_counter()
        lr = set_rates(self._optimizer, config, number)
        self._seed_dropout(number)
        self._optimizer.zero_grad()
        losses = []
        for part in range(config.accumulate):
            tokens, target = self._batches.of((number - 1) * config.accumulate + part)
            with self._autocast():
                args, kwargs = self._inputs(tokens)
                loss = self.pipe.step(
                    *args,
                    target=self._own(target),
                    finalize=part == config.accumulate - 1,
                    grad_scale=1 / config.accumulate,
                    **kwargs,
                )
            losses.append(loss.item())
        loss = math.fsum(losses) / len(losses)
        skipped = self._find_bad_value(number)
        if not skipped and not math.isfinite(loss):
            raise OptionError(
                f"the loss is {loss} in step {number}. Train with a smaller --lr, or give "
                "--skip-bad-steps to skip such steps and see where they go wrong."
            )
        norm = None
        if not skipped:
            if config.clip is not None:
                norm = self.pipe.clip_grad_norm_(config.clip).item()
            self._optimizer.step()
        took_s = time.perf_counter() - began_s
        if self._is_to_be_saved(number):
            self._save(number)
        if self._snapshots is not None and self._is_to_be_kept(number):
            self._snapshots.take(number)
        speed = config.tokens_per_step / took_s
        return StepDone(number, loss, took_s, speed, lr, norm, skipped=skipped)

    def _find_bad_value(self, number: int) -> str:
        """Return what is wrong with a step that was skipped; stop after too many in a row."""
        bad, most = self.pipe.bad_value, self._config.skip_bad_steps
        if bad is None or most is None:
            self._num_skipped = 0
            return ""
        found = str(replace(bad, step=number))
        self._num_skipped += 1
        if self._num_skipped > most:
            raise OptionError(
                f"{found}. That is step {self._num_skipped} in a row that is not finite, and "
                f"--skip-bad-steps is {most}. Train with a smaller --lr, or look at the data and "
                "the model there."
            )
        return found

    def is_to_be_evaluated(self, number: int) -> bool:
        """Return whether an evaluation follows a step."""
        if not self._config.has_evaluation:
            return False
        every = self._config.eval_every
        return number == self._config.steps or (every is not None and number % every == 0)

    def evaluate(self, step: int, on_evaluated: Callable[[Evaluated], None]) -> Evaluated:
        """Return the loss on held-out data, on every rank; report it on rank 0."""
        assert self._evaluation is not None

        def evaluate(tokens: Tensor, target: Tensor) -> Tensor:
            args, kwargs = self._inputs(tokens)
            with self._autocast():
                loss: Tensor = self.pipe.evaluate(*args, target=self._own(target), **kwargs)
            return loss

        found = self._evaluation.run(step, evaluate)
        if self._comm.rank == 0:
            on_evaluated(found)
        return found

    def continue_text(self) -> str:
        """Return the prompt and the likeliest text after it, on every rank."""
        config = self._config

        def predict(tokens: Tensor) -> object:
            args, kwargs = self._inputs(tokens)
            with self._autocast():
                return self.pipe.predict(*args, **kwargs)

        made = continue_text(
            self.pipe,
            self._prompt,
            rows=config.batch,
            context=config.context,
            predict=predict,
            end=self._tokens.end,
        )
        return config.sample + self._tokens.decode(made)

    def finish(self) -> Recording | None:
        """End the run after the last step; return the recording, if one was asked for."""
        recording = self.pipe.recording() if self._config.record else None
        if recording is not None and self._comm.rank == 0:
            recording.save(self._config.record)
        if self._snapshots is not None:
            self._snapshots.close()
        self.pipe.close()
        return recording

    def _inputs(self, tokens: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model for this pipeline's part of a batch."""
        return as_inputs(self._config, self._own(tokens))

    def _own(self, batch: Tensor) -> Tensor:
        """Return this pipeline's part of a batch, on its device."""
        part = batch.chunk(self._config.num_pipelines)[self._place.pipeline]
        return part.to(self._place.device)

    def _autocast(self) -> AbstractContextManager[None]:
        if not self._config.autocast:
            return nullcontext()
        dtype = getattr(torch, self._config.autocast)
        return torch.autocast(self._place.device.type, dtype)

    def _seed_dropout(self, number: int) -> None:
        """Let dropout depend on the step and the place, so that resuming repeats it."""
        name = f"step {number} of rank {self._comm.rank}"
        torch.manual_seed(generator_for(self._config.seed, name).initial_seed())

    def _is_to_be_saved(self, number: int) -> bool:
        is_due = number == self._config.steps or number % self._config.every == 0
        return bool(self._config.checkpoint) and is_due

    def _is_to_be_kept(self, number: int) -> bool:
        assert self._config.snapshot_every is not None
        return number < self._config.steps and number % self._config.snapshot_every == 0

    def _save(self, number: int) -> None:
        folder = Path(self._config.checkpoint)
        extra = self._saved.after(number).as_json()
        self.pipe.save(step_folder(folder, number), self._optimizer, extra=extra)
        if self._comm.rank == 0:
            remove_old(folder, self._config.keep)
