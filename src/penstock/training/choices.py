"""From options to the config of a run, and the checks of it that do not need torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import OptionError
from penstock.extras import needed_by
from penstock.schedules.given_shape import is_auto
from penstock.training.documents import Documents, read_documents
from penstock.training.launching import has_launcher, is_worker
from penstock.training.model_sources import HuggingFaceModel, find_model
from penstock.training.orders import choose_orders, is_file, read_schedule
from penstock.training.saved import (
    check_folder,
    check_same,
    digests_of,
    find_latest,
    saved_steps,
)
from penstock.training.settings import TrainConfig, option_of

_DEFAULT_SHARE = 0.05
_OF_MODEL = ("model", "layers", "width", "heads", "context")


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads."""

    documents: Documents
    evaluated: Documents | None = None
    """Data to evaluate on, if it is not a share of `documents`."""


def make_config(given: Mapping[str, Any], env: Mapping[str, str]) -> TrainConfig:
    """Return the config of options by their names; on a started rank, `env` has the processes.

    A resumed run takes the options that were left out from its checkpoint, if they are there; one
    whose launcher restarts ranks is resumed from its checkpoint whenever there is one. A
    schedule in a file has its own numbers of ranks and microbatches.
    """
    options = dict(given)
    if _is_restarted_by_others(env) and saved_steps(Path(options.get("checkpoint") or os.devnull)):
        options["resume"] = True
    if options.get("resume") and options.get("checkpoint"):
        kept = find_latest(Path(options["checkpoint"])).kept()
        if "model" in options:
            kept = {name: value for name, value in kept.items() if name not in _OF_MODEL}
        options = {**_still_fitting(kept, given, env), **options}
    name = options.get("schedule", "")
    in_file = read_schedule(name) if is_file(name) else None
    if in_file is not None:
        options.setdefault("microbatches", in_file.num_microbatches)
    started = _started_ranks(options, env)
    if started is not None:
        options["ranks"] = started
    elif in_file is not None:
        options.setdefault("ranks", in_file.num_ranks)
    _choose_share(options)
    names = {option_of(field.name): field.name for field in fields(TrainConfig)}
    values: dict[str, Any] = {
        names[option]: tuple(value) if isinstance(value, list) else value
        for option, value in options.items()
        if option not in _OF_MODEL
    }
    config = TrainConfig(find_model(options), **values)
    if config.snapshot_every and not (config.restarts or _is_restarted_by_others(env)):
        raise OptionError(
            f"--snapshot-every is {config.snapshot_every}, but nothing starts ranks again to use "
            "snapshots. Give --restarts, or torchrun --max-restarts."
        )
    return config


def _still_fitting(
    kept: dict[str, Any], given: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options of a checkpoint without those that others, given now, take the place of.

    A launcher says how many ranks there are; a schedule brings its own numbers; and a schedule in
    a file is for one number of ranks.
    """
    dropped = set()
    if is_worker(env):
        dropped |= {"ranks"}
    if "schedule" in given:
        dropped |= {"ranks", "stages-per-rank"}
    if "ranks" in given and is_file(str(kept.get("schedule", ""))):
        dropped |= {"schedule", "stages-per-rank"}
    return {name: value for name, value in kept.items() if name not in dropped}


def _is_restarted_by_others(env: Mapping[str, str]) -> bool:
    """Return whether torchrun starts ranks again after a failure.

    That it has done so is not asked: one of several launchers may be new, and not know it.
    """
    return is_worker(env) and env.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def _choose_share(options: dict[str, Any]) -> None:
    """Hold out a share of the data if something is to be evaluated and nothing is said."""
    is_wanted = options.get("eval-every") is not None or options.get("evaluate-only")
    if is_wanted and not options.get("eval-data"):
        options.setdefault("eval-share", _DEFAULT_SHARE)


def check_run(config: TrainConfig) -> Data:
    """Return the data that the run reads; raise an error if the run is impossible."""
    choose_orders(config)
    check_packages(config)
    documents = read_documents(config.data)
    _check_length(config, documents)
    evaluated = read_documents(config.eval_data, option="eval-data") if config.eval_data else None
    digests_of(config, documents)
    if config.checkpoint:
        check_folder(config)
    first = 0
    if config.resume:
        saved = find_latest(Path(config.checkpoint))
        check_same(saved, config, documents)
        first = saved.step
    elif config.evaluate_only and not _has_weights(config):
        raise OptionError(
            "--evaluate-only is given, but there are no weights to evaluate. Give --checkpoint "
            "and --resume, or a --model with weights."
        )
    for name in ("record", "log"):
        if getattr(config, name):
            _check_file(name, Path(getattr(config, name)))
    if config.record and is_auto(config.schedule) and config.steps - first < 2:
        raise OptionError(
            "--record is given for a single step with --schedule auto. Its first step counts "
            "memory and is not recorded. Train for more --steps, or with another --schedule."
        )
    if config.export and not isinstance(config.model, HuggingFaceModel):
        raise OptionError(
            f"--export is {config.export}, but {config.model} is not a model of transformers. "
            "Expected --model to be a folder of Hugging Face; others are in the --checkpoint."
        )
    return Data(documents, evaluated)


def check_packages(config: TrainConfig) -> None:
    """Raise an error if a package is missing that ranks would import."""
    is_of_transformers = isinstance(config.model, HuggingFaceModel)
    for what, package, extra, is_needed in (
        (f"--model {config.model}", "transformers", "hf", is_of_transformers),
        ("a tokenizer.json", "tokenizers", "train", config.tokenizer_file is not None),
        ("--tensorboard", "tensorboard", "train", bool(config.tensorboard)),
    ):
        if is_needed:
            with needed_by(what, [package], extra=extra, error=OptionError):
                if find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)
    if config.wandb and find_spec("wandb") is None:
        raise OptionError("--wandb needs wandb: pip install wandb")


def _check_length(config: TrainConfig, documents: Documents) -> None:
    """Raise an error if bytes are too few; other tokens are counted once ranks have made them."""
    if config.tokenizer_file is None and documents.num_tokens_at_most <= config.context:
        raise OptionError(
            f"the data, {documents.name}, has {documents.num_tokens_at_most} bytes. Expected at "
            f"least {config.context + 1}, because --context is {config.context}: give longer "
            "--data, or a smaller --context."
        )


def _has_weights(config: TrainConfig) -> bool:
    return not isinstance(config.model, HuggingFaceModel) or config.model.has_weights


def _check_file(name: str, path: Path) -> None:
    is_there = path.is_file() if path.exists() else path.parent.is_dir()
    if not is_there or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(
            f"--{name} is {path}, which cannot be written. "
            "Name a file in an existing folder that you can write to."
        )


def _started_ranks(options: Mapping[str, Any], env: Mapping[str, str]) -> int | None:
    """Return the ranks of each pipeline if a launcher has started them, else None."""
    if not is_worker(env):
        return None
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not env[name].isdecimal():
            raise OptionError(
                f"{name} is {env[name]!r} in the environment. Expected a number, as a launcher "
                "sets it. Unset it to start ranks on this machine."
            )
    if options.get("restarts") and not has_launcher(env):
        raise OptionError(
            f"--restarts is {options['restarts']}, but another launcher has started the ranks, "
            "and only that can start them again. Give torchrun --max-restarts instead."
        )
    started = int(env["WORLD_SIZE"])
    pipelines = options.get("replicas", 1) * options.get("shards", 1)
    given = options.get("ranks", max(1, started // pipelines))
    if given * pipelines != started:
        each = f" in each of {pipelines} pipelines" if pipelines > 1 else ""
        raise OptionError(
            f"--ranks is {given}{each}, but {started} were started. Leave it out if a launcher "
            "starts the ranks."
        )
    return int(given)
