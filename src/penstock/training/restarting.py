"""Go on with a training after one of its ranks has died."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.training.launching import first_cause
from penstock.training.rank_processes import Failure
from penstock.training.saved import last_step, saved_steps
from penstock.training.settings import TrainConfig


class Restarts:
    """The restarts that a training has left.

    With `min_ranks`, a rank that died is lost, as a device would be: a spare takes its place, and
    when there are none, each pipeline goes on with fewer ranks. Otherwise, it is started again.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._num_done = 0
        self._num_places = config.num_processes + config.spares

    def after(self, failed: Sequence[Failure]) -> TrainConfig | None:
        """Return what goes on after these failures, and say so; None if nothing does."""
        config, cause = self._config, first_cause(failed)
        if self._num_done == config.restarts or cause.is_told:
            return None
        saved = saved_steps(Path(config.checkpoint)) if config.checkpoint else []
        if saved and saved[-1] >= config.steps:  # It died after the end of the training.
            return None
        self._num_places -= num_lost(failed)
        num_ranks, spares = config.num_ranks, config.spares
        if config.min_ranks is not None:
            num_ranks = min(num_ranks, self._num_places // config.num_pipelines)
            if num_ranks < config.min_ranks:
                left = f"{num_ranks} ranks are left, and --min-ranks is {config.min_ranks}"
                _say(f"{cause.describe()}: {left}")
                return None
            spares = self._num_places - num_ranks * config.num_pipelines
        self._num_done += 1
        following = replace(config, num_ranks=num_ranks, spares=spares, resume=bool(saved))
        last = last_step(following, os.getpid())
        where = f"going on from step {last}" if last else "beginning again at step 1"
        _say(
            f"{cause.describe()}: {where} on {num_ranks} ranks (restart {self._num_done} of "
            f"{config.restarts})"
        )
        return following


def num_lost(failed: Sequence[Failure]) -> int:
    """Return how many ranks were lost: others may have failed because of these.

    They are those that a signal has ended; if there are none, the one that failed first.
    """
    return max(1, sum(each.is_own and each.code < 0 for each in failed))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
