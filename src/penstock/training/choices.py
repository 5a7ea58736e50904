"""The options of a run, and the checks of them that do not need torch."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from penstock.errors import OptionError
from penstock.training.launching import is_worker
from penstock.training.orders import AUTO, choose_orders, is_file, read_schedule
from penstock.training.saved import Saved, check_folder, check_same, find_latest
from penstock.training.settings import SIZES, GptConfig, TrainConfig
from penstock.training.text import Text, read_text

DEFAULT_SIZE = "small"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options of a run; None if an option was left out.

    A resumed run takes the options that were left out from its checkpoint, if they are there.
    A schedule in a file has its own numbers of ranks and microbatches.
    """

    size: str | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    text: str | None = None
    ranks: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    microbatches: int | None = None
    batch: int | None = None
    steps: int | None = None
    lr: float | None = None
    seed: int | None = None
    checkpoint: str = ""
    every: int | None = None
    resume: bool = False
    record: str = ""

    def config(self, env: Mapping[str, str]) -> TrainConfig:
        """Return the config of the run; on a started rank, `env` has the number of ranks."""
        plain = TrainConfig(SIZES[DEFAULT_SIZE])
        is_there = self.resume and self.checkpoint
        saved = find_latest(Path(self.checkpoint)) if is_there else None
        name = _first(self.schedule, plain.schedule)
        in_file = read_schedule(name) if is_file(name) else None
        before = saved or Saved.of(plain, Text("", b""))
        own_microbatches = in_file.num_microbatches if in_file else before.num_microbatches
        own_ranks = in_file.num_ranks if in_file else plain.num_ranks
        return TrainConfig(
            self._model(before.model),
            text=_first(self.text, before.text),
            num_ranks=_num_ranks(self.ranks, env, own_ranks),
            schedule=name,
            stages_per_rank=self.stages_per_rank,
            num_microbatches=_first(self.microbatches, own_microbatches),
            batch=_first(self.batch, before.batch),
            steps=_first(self.steps, plain.steps),
            lr=_first(self.lr, before.lr),
            seed=_first(self.seed, before.seed),
            checkpoint=self.checkpoint,
            every=_first(self.every, plain.every),
            resume=self.resume,
            record=self.record,
        )

    def _model(self, otherwise: GptConfig) -> GptConfig:
        if self.size is not None and self.size not in SIZES:
            close = difflib.get_close_matches(self.size.lower(), SIZES, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise OptionError(
                f"--size is {self.size!r}. {hint}Expected one of {', '.join(SIZES)}; or give "
                "--layers, --width, --heads and --context."
            )
        base = otherwise if self.size is None else SIZES[self.size]
        return replace(
            base,
            num_layers=_first(self.layers, base.num_layers),
            width=_first(self.width, base.width),
            num_heads=_first(self.heads, base.num_heads),
            context=_first(self.context, base.context),
        )


def check_run(config: TrainConfig) -> Text:
    """Return the text that the run reads; raise an error if the run is impossible."""
    choose_orders(config)
    text = read_text(config.text, context=config.model.context)
    if config.checkpoint:
        check_folder(config)
    first = 0
    if config.resume:
        saved = find_latest(Path(config.checkpoint))
        check_same(saved, config, text)
        first = saved.step
    if config.record:
        _check_record(Path(config.record))
        if config.schedule.lower() == AUTO and config.steps - first < 2:
            raise OptionError(
                "--record is given for a single step with --schedule auto. Its first step counts "
                "memory and is not recorded. Train for more --steps, or with another --schedule."
            )
    return text


def _check_record(path: Path) -> None:
    is_there = path.is_file() if path.exists() else path.parent.is_dir()
    if not is_there or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(
            f"--record is {path}, which cannot be written. "
            "Name a file in an existing folder that you can write to."
        )


def _num_ranks(given: int | None, env: Mapping[str, str], otherwise: int) -> int:
    if not is_worker(env):
        return _first(given, otherwise)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not env[name].isdecimal():
            raise OptionError(
                f"{name} is {env[name]!r} in the environment. Expected a number, as a launcher "
                "sets it. Unset it to start ranks on this machine."
            )
    started = int(env["WORLD_SIZE"])
    if given not in (None, started):
        raise OptionError(
            f"--ranks is {given}, but {started} were started. Leave it out if a launcher starts "
            "the ranks."
        )
    return started


def _first(given: _Value | None, otherwise: _Value) -> _Value:
    return otherwise if given is None else given
