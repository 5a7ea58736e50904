"""Snapshots of a training in the memory of a process that outlives its ranks."""

import random
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from penstock.errors import CheckpointError
from penstock.parallel.json_keys import with_any_keys, without_keys_apart
from penstock.parallel.optimizer_state import join_settings
from penstock.parallel.ranks_together import RanksTogether
from penstock.parallel.training_state import TrainingState
from penstock.snapshots import KeptState, Part, Snapshot
from penstock.stage.dtensors import Spread, local_part

_Spread: TypeAlias = list[Any]
"""The shape of a whole DTensor, how it lies on its mesh, and this rank's place there."""
_RESTORING = "to restore a snapshot"
_RANDOM = "random."


class Snapshots:
    """Snapshots of a training in memory; `pipe.snapshots(optimizer)` makes it, on all ranks.

    They are kept by a process of each machine, which ends with the launcher of the ranks: so they
    outlive ranks that are killed, and those that the launcher starts again. If the ranks are on
    several machines, each of them may be lost: others have copies.
    """

    def __init__(self, state: TrainingState, ranks: RanksTogether) -> None:
        if ranks.are_threads:
            raise CheckpointError(
                "the ranks are threads, which end together with their process, so snapshots in "
                "memory would not outlive them. Save to a folder instead."
            )
        self._state, self._ranks = state, ranks
        self._kept = KeptState(ranks.gather)

    def take(self, step: int, *, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the weights, the optimizer, the random generators, and `extra`, after a step.

        All ranks must call it. It returns when the copy is made; the rest happens meanwhile.
        """
        if not isinstance(step, int) or step < 1:
            raise CheckpointError(f"step is {step!r}. Expected the number of a step, from 1 on.")
        tensors, settings = self._state.held()
        device = self._device
        tensors = {**tensors, f"{_RANDOM}cpu": torch.get_rng_state()}
        if device.type != "cpu":
            tensors[f"{_RANDOM}device"] = torch.get_device_module(device).get_rng_state(device)
        about = {
            "settings": settings,
            "spreads": _spreads(tensors),
            "random": _plain_generators(),
            "extra": with_any_keys(dict(extra or {})),
        }
        local = {name: local_part(value) for name, value in tensors.items()}
        self._kept.write(step, local, about)

    def restore(self, *, after: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Load the newest snapshot that all ranks have; return its step and its `extra`.

        All ranks must call it. Return None if there is none of a step later than `after`. Random
        generators are restored if there are as many ranks as before, and each rank gets its own
        `extra`; otherwise all get that of a rank that their machine has.
        """
        found = self._kept.read()
        if found is None or found.step <= after:
            return None
        error: Exception | None = None
        extra: dict[str, Any] = {}
        try:
            extra = self._load(found)
        except Exception as failed:  # Any of them must reach the other ranks.
            error = failed
        problem = self._ranks.first_problem(error, _RESTORING)
        if isinstance(error, CheckpointError):
            raise error
        if problem:
            raise CheckpointError(
                f"the snapshot of step {found.step} cannot be loaded: {problem}. Expected one of "
                "this model: load a checkpoint."
            ) from error
        return found.step, extra

    def close(self) -> None:
        """Drop all snapshots, at the end of a training. All ranks must call it."""
        self._kept.close()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._ranks.pipeline.stages.values())).device

    def _load(self, found: Snapshot) -> dict[str, Any]:
        # On the same ranks, each has its own first: buffers of replicas may differ.
        is_same = found.num_ranks == self._kept.num_ranks
        own = [part for part in found.parts if is_same and part.rank == self._kept.rank]
        others = [part for part in found.parts if not is_same or part.rank != self._kept.rank]
        stored: dict[str, Tensor] = {}
        spreads: dict[str, _Spread] = {}
        for part in (*own, *others):
            stored = {**part.tensors, **stored}
            spreads = {**part.extra["spreads"], **spreads}
        if spreads and not own:
            raise CheckpointError(
                f"the snapshot of step {found.step} has {min(spreads)!r} in shards, as "
                f"{found.num_ranks} ranks had it, and there are {self._kept.num_ranks}. Expected "
                "as many: load a checkpoint, which fits any number."
            )
        forms = {name: _form(value, spreads.get(name)) for name, value in stored.items()}
        groups = join_settings([part.extra["settings"] for part in found.parts])

        def read(state: dict[str, Tensor]) -> None:
            now = _spreads(state)
            for name, value in state.items():
                if name not in stored:
                    raise CheckpointError(
                        f"the snapshots that this rank can have lack {name!r}. Expected the cut "
                        "and the ranks that they were taken with: load a checkpoint."
                    )
                if spreads.get(name) != now.get(name):
                    raise CheckpointError(
                        f"{name!r} was {_in_words(spreads.get(name))}, and is "
                        f"{_in_words(now.get(name))} now. Expected the same mesh: load a "
                        "checkpoint, which fits any."
                    )
                own_part = local_part(value)
                if own_part.shape != stored[name].shape:
                    raise CheckpointError(
                        f"{name!r} has the shape {tuple(own_part.shape)}, and that of the snapshot "
                        f"is {tuple(stored[name].shape)}. Expected a snapshot of this model: make "
                        "it as it was then."
                    )
                own_part.copy_(stored[name])

        with torch.no_grad():
            self._state.fill(Path(f"the snapshot of step {found.step}"), forms, groups, read)
        for part in own:
            self._restore_generators(part)
        first = min(own or found.parts, key=lambda part: part.rank)
        return dict(without_keys_apart(first.extra["extra"]))

    def _restore_generators(self, own: Part) -> None:
        torch.set_rng_state(own.tensors[f"{_RANDOM}cpu"].clone())
        device = self._device
        if (state := own.tensors.get(f"{_RANDOM}device")) is not None:
            torch.get_device_module(device).set_rng_state(state.clone(), device)
        version, numbers, following = own.extra["random"]["python"]
        random.setstate((version, tuple(numbers), following))
        if (state_of_numpy := own.extra["random"].get("numpy")) is not None:
            import_module("numpy").random.set_state(tuple(state_of_numpy))


def _plain_generators() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, as JSON can hold them."""
    found: dict[str, Any] = {"python": random.getstate()}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        kind, numbers, *others = numpy_random.get_state()
        found["numpy"] = [kind, numbers.tolist(), *others]
    return found


def _spreads(tensors: Mapping[str, Tensor]) -> dict[str, _Spread]:
    """Describe how each DTensor lies on its mesh, and which part of it this rank has."""
    found: dict[str, _Spread] = {}
    for name, value in tensors.items():
        if (spread := Spread.of(value)) is not None:
            place = list(spread.coordinate or ())
            found[name] = [list(spread.shape), spread.in_words, place]
    return found


def _in_words(spread: _Spread | None) -> str:
    if spread is None:
        return "whole"
    shape, words, place = spread
    return f"part {tuple(place)} of a tensor of shape {tuple(shape)} with {words}"


def _form(value: Tensor, spread: _Spread | None) -> TensorStorageMetadata:
    """Describe a tensor as a checkpoint does."""
    shape = value.shape if spread is None else torch.Size(spread[0])
    return TensorStorageMetadata(TensorProperties(value.dtype), shape, [])
