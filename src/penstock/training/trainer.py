"""The trainer: the work of each rank from the first step to the last."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.comm import AbstractComm, LocalGroup, ProcessGroupComm, check_agreement
from penstock.comm.abstract_comm import Transfer
from penstock.errors import OptionError
from penstock.ir import Rank, Schedule
from penstock.ir.message import Channel
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S, Pipeline
from penstock.stage import Group, PipelineStage
from penstock.timeline.recording import Recording
from penstock.training import checkpoint
from penstock.training.batches import Batches
from penstock.training.gpt import build_stages, cut, loss_of
from penstock.training.orders import AUTO, choose_orders
from penstock.training.saved import Saved, check_same, find_latest, kept_from_others
from penstock.training.settings import TrainConfig
from penstock.training.text import Text


@dataclass(frozen=True, slots=True)
class StepDone:
    """A finished step, as rank 0 reports it."""

    step: int
    """The number of the step, from 1 on."""
    loss: float
    """The mean over the microbatches, before the weights changed."""
    duration_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run."""

    steps: tuple[StepDone, ...]
    """The finished steps on rank 0; empty on other ranks, which do not know the losses."""
    schedule: Schedule
    """The schedule that the next step would run."""

    @property
    def tokens_per_s(self) -> float:
        """The median over the steps."""
        return statistics.median(done.tokens_per_s for done in settled(self.steps))


def settled(steps: Sequence[StepDone]) -> Sequence[StepDone]:
    """Return the steps without the first, in which the ranks connect, unless it is the only one."""
    return steps[1:] or steps


def train(
    config: TrainConfig,
    text: Text,
    *,
    group: Group = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[StepDone], None] = lambda done: None,
) -> Trained:
    """Train a model; every rank calls this with the same config and text.

    The ranks are those of `group`, as for a PipelineStage. `on_step` is called on rank 0 after
    each step.
    """
    with connected(group, torch.device(device)) as comm:
        if comm.num_ranks != config.num_ranks:
            raise OptionError(
                f"--ranks is {config.num_ranks}, but there are {comm.num_ranks}. Give that number."
            )
        check_agreement(
            comm.gather({"the config": config, "the text": text.digest}, "to begin the training")
        )
        with kept_from_others(config.checkpoint) if comm.rank == 0 else nullcontext():
            run = RankTraining(config, text, comm, group, torch.device(device))
            steps = []
            for number in range(run.first + 1, config.steps + 1):
                done = run.step(number)
                if done is not None:
                    steps.append(done)
                    on_step(done)
            run.finish()
        return Trained(tuple(steps), run.pipeline.schedule)


@contextmanager
def connected(group: Group, device: torch.device) -> Iterator[AbstractComm]:
    """Connect the ranks for messages of the trainer; an error in the block reaches all ranks."""
    comm: AbstractComm
    if isinstance(group, LocalGroup):
        comm = group.connect()
    else:
        comm = ProcessGroupComm(group, device, DEFAULT_TIMEOUT_S)
    try:
        yield comm
        # No rank leaves while another may still read from it.
        comm.gather(None, "to end the training")
        comm.close()
    except BaseException as error:
        comm.fail(f"{type(error).__name__}: {error}")
        raise


class RankTraining:
    """One rank's stages, with the optimizer, pipeline and batches to train them."""

    def __init__(
        self,
        config: TrainConfig,
        text: Text,
        comm: AbstractComm,
        group: Group,
        device: torch.device,
    ) -> None:
        self._config, self._comm, self._group = config, comm, group
        self._saved = Saved.of(config, text)
        orders = choose_orders(config)
        microbatch = config.batch // config.num_microbatches
        self.stages: Sequence[PipelineStage] = build_stages(
            cut(config.model, orders.placement, microbatch=microbatch),
            config.model,
            orders.placement,
            rank=comm.rank,
            seed=config.seed,
            device=device,
            group=group,
        )
        weights = [weight for stage in self.stages for weight in stage.submod.parameters()]
        self._optimizer = torch.optim.AdamW(weights, lr=config.lr)
        self.first = self._resume(text) if config.resume else 0
        self.pipeline = Pipeline(
            self.stages,
            AUTO if orders.schedule is None else orders.schedule,
            num_microbatches=config.num_microbatches,
            loss_fn=loss_of,
            record=bool(config.record),
        )
        self._batches = Batches(
            text, context=config.model.context, batch=config.batch, seed=config.seed
        )
        self._line = _LossLine(comm, orders.placement.ranks[-1], device)
        self._device = device

    def _resume(self, text: Text) -> int:
        """Load the last checkpoint; return its step."""
        folder = Path(self._config.checkpoint)
        found = find_latest(folder)
        check_same(found, self._config, text)
        checkpoint.load(folder, found.step, self.stages, self._optimizer)
        return found.step

    def step(self, number: int) -> StepDone | None:
        """Run one step, and save a checkpoint if one is due; return the result on rank 0."""
        began_s = time.perf_counter()
        tokens, target = (batch.to(self._device) for batch in self._batches.of(number))
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        self.pipeline.step(tokens, target=target, losses=losses, return_outputs=False)
        loss = self._line.tell(number, losses)
        self._optimizer.step()
        duration_s = time.perf_counter() - began_s
        if self._is_to_be_saved(number):
            saved = self._saved.after(number)
            folder = Path(self._config.checkpoint)
            checkpoint.save(folder, saved, self.stages, self._optimizer, self._comm, self._group)
        if self._comm.rank > 0:
            return None
        return StepDone(number, loss, duration_s, self._config.tokens_per_step / duration_s)

    def _is_to_be_saved(self, number: int) -> bool:
        is_due = number == self._config.steps or number % self._config.every == 0
        return bool(self._config.checkpoint) and is_due

    def finish(self) -> Recording | None:
        """End the run after the last step; return the recording, if one was asked for."""
        self._line.finish()
        recording = self.pipeline.recording() if self._config.record else None
        if recording is not None and self._comm.rank == 0:
            recording.save(self._config.record)
        self.pipeline.close()
        return recording


class _LossLine:
    """The channel for the loss, from the rank of the last stage to rank 0; no other rank waits.

    In a zero-bubble schedule, each rank begins a step as soon as its previous step has ended, so
    the ranks must not synchronise after each step.
    """

    def __init__(self, comm: AbstractComm, source: Rank, device: torch.device) -> None:
        self._comm, self._source, self._device = comm, source, device
        self._sent: list[tuple[Transfer, Tensor]] = []
        if source != 0:
            comm.open([Channel(source, 0)])

    def tell(self, step: int, losses: list[Tensor]) -> float:
        """Return the loss on rank 0 and on the rank that computes it, and nan on others."""
        loss = torch.full((1,), math.nan, device=self._device)
        if self._comm.rank == self._source:
            loss = torch.stack(losses).mean().reshape(1)
            if not math.isfinite(loss.item()):
                raise OptionError(
                    f"the loss is {loss.item()} in step {step}. Train with a smaller --lr."
                )
        if self._source != 0:
            if self._comm.rank == self._source:
                self.finish()
                self._sent.append((self._comm.send(loss, 0), loss))
            elif self._comm.rank == 0:
                self._comm.recv(loss, self._source).wait(lambda: f"the loss of step {step}")
        return loss.item()

    def finish(self) -> None:
        """Wait until rank 0 has received all losses that were sent."""
        for transfer, _ in self._sent:
            transfer.wait(lambda: "rank 0 to take a loss")
        self._sent.clear()
