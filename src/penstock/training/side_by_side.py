"""Train one model by several schedules in turn, so that only the schedules differ.

All start from the same weights and see the same batches. They take turns step by step, because the
speed of the machine may change from one minute to the next. Each is recorded.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.comm import AbstractComm
from penstock.stage import Group
from penstock.timeline import Recording
from penstock.training.choices import Data
from penstock.training.connected_ranks import connected
from penstock.training.settings import TrainConfig
from penstock.training.trainer import RankTraining, StepDone, settled

_TURN = "to take turns with the next schedule"


@dataclass(frozen=True, slots=True)
class Contender:
    """One of the schedules, with its steps and its recording."""

    schedule: str
    steps: tuple[StepDone, ...]
    recording: Recording

    @property
    def losses(self) -> list[float]:
        return [done.loss for done in self.steps]

    @property
    def step_s(self) -> float:
        """The median time of a step."""
        return statistics.median(done.duration_s for done in settled(self.steps))

    @property
    def tokens_per_s(self) -> float:
        """The median over the steps."""
        return statistics.median(done.tokens_per_s for done in settled(self.steps))


def train_side_by_side(
    configs: Sequence[TrainConfig],
    data: Data,
    *,
    group: Group = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[str, StepDone], None] = lambda schedule, done: None,
) -> list[Contender]:
    """Train by the schedule of each config; every rank calls this, and rank 0 gets the results.

    The configs differ only in their schedules and in the files they record to.
    """
    with connected(group, torch.device(device)) as comm:
        runs = [RankTraining(config, data, comm, group, torch.device(device)) for config in configs]
        steps: list[list[StepDone]] = [[] for _ in configs]
        for number in range(1, configs[0].steps + 1):
            # The order may matter to caches, so it is reversed in every round.
            for place in _in_turn(len(runs), number):
                done = _step_of_all(runs[place], number, comm)
                if done is not None:
                    steps[place].append(done)
                    on_step(configs[place].schedule, done)
        recordings = [run.finish() for run in runs]
        if comm.rank > 0:
            return []
        return [
            Contender(config.schedule, tuple(taken), recording)
            for config, taken, recording in zip(configs, steps, recordings, strict=True)
            if recording is not None
        ]


def _step_of_all(run: RankTraining, number: int, comm: AbstractComm) -> StepDone | None:
    """Run a step, timed from when all ranks can begin to when all have ended; rank 0 gets it."""
    comm.gather(None, _TURN)
    began_s = time.perf_counter()
    done = run.step(number)
    comm.gather(None, _TURN)
    if comm.rank > 0:
        return None
    took_s = time.perf_counter() - began_s
    tokens = done.tokens_per_s * done.duration_s
    return replace(done, duration_s=took_s, tokens_per_s=tokens / took_s)


def _in_turn(count: int, number: int) -> Sequence[int]:
    places = range(count)
    return places if number % 2 else places[::-1]
