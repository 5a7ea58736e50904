"""The work of a process that is one rank of a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.parallel.joining import choose_device, join_ranks
from penstock.runtime.bad_values.value_guard import LOGGER as BAD_VALUES
from penstock.training.choices import Data
from penstock.training.forecast import Forecast
from penstock.training.held_out import Evaluated
from penstock.training.log_sinks import Logs
from penstock.training.settings import TrainConfig
from penstock.training.trainer import StepDone, Trained, train


class Shown(Protocol):
    """Where a run is shown while it goes on."""

    def show_forecast(self, found: Forecast) -> None:
        """Show what the run is expected to need, before its first step."""

    def show(self, done: StepDone) -> None:
        """Show a step that has finished."""

    def show_evaluated(self, found: Evaluated) -> None:
        """Show an evaluation."""


@contextmanager
def joined() -> Iterator[torch.device]:
    """Join the other ranks by the variables in the environment; yield the device to use."""
    device = choose_device()
    join_ranks(device)
    yield device
    dist.destroy_process_group()  # Not after an error: the other ranks may never reach this.


def work(config: TrainConfig, data: Data, shown: Shown, *, is_first: bool) -> Trained:
    """Train as one rank; the first one shows and logs the steps."""
    logs = Logs(config) if is_first else None

    def on_step(done: StepDone) -> None:
        shown.show(done)
        if logs is not None:
            logs.step(done)

    def on_evaluated(found: Evaluated) -> None:
        shown.show_evaluated(found)
        if logs is not None:
            logs.evaluated(found)

    BAD_VALUES.setLevel(logging.ERROR)  # What is skipped is shown.
    try:
        with joined() as device:
            return train(
                config,
                data,
                device=device,
                on_step=on_step,
                on_evaluated=on_evaluated,
                on_forecast=shown.show_forecast,
            )
    finally:
        if logs is not None:
            logs.close()
