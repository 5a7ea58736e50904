"""The state of a training in a folder: weights, optimizer, and what the caller adds.

    FOLDER/
      .metadata, *.distcp    torch.distributed.checkpoint: tensors under the model's own names
      training.json          the settings of the optimizer, and `extra`

The keys are `model.<name>`, as in the model's state dict, and `optimizer.state.<name>.<kind>`. They
do not depend on stages or ranks: each rank writes what it has and reads what it needs.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from penstock.comm.world_watch import doing
from penstock.errors import CheckpointError
from penstock.parallel.checkpoint_reader import CheckpointReader
from penstock.parallel.json_keys import with_any_keys, without_keys_apart
from penstock.parallel.optimizer_state import OptimizerState, join_settings
from penstock.parallel.ranks_together import RanksTogether, describe_error
from penstock.parallel.replaced_folder import begin_folder, complete_folder, restore_folder
from penstock.parallel.stage_names import StageNames
from penstock.stage.stage_checks import unwrapped
from penstock.torch_private import is_dtensor

_FORMAT = "penstock training state"
_FILE = "training.json"
_SAVING = "to save the training"
_LOADING = "to load the training"
_FAILURES = (Exception, CheckpointException)
"""All errors: torch's own is not an Exception."""


class Saving:
    """A folder that is being written, or has been."""

    def __init__(
        self, folder: Path, ranks: RanksTogether, done: "Future[None]", timeout_s: float
    ) -> None:
        self.folder = folder
        self._ranks = ranks
        self._done = done
        self._timeout_s = timeout_s
        self._has_ended = False

    def wait(self) -> None:
        """Wait until the folder is complete, on all ranks, which must all call this.

        Raise an error on all of them if it could not be written, or not in the pipeline's time.
        """
        if self._has_ended:
            return
        self._has_ended = True
        error: BaseException | None = None
        try:
            self._done.result(self._timeout_s)
        except _FAILURES as failed:
            error = failed
        _raise_together(error, self.folder, self._ranks)

    @property
    def is_done(self) -> bool:
        """True if this rank has written its part, or has failed to."""
        return self._done.done()


class TrainingState:
    """What a rank saves and loads: its stages, and the state of its optimizers."""

    def __init__(
        self,
        names: StageNames,
        ranks: RanksTogether,
        optimizers: Sequence[torch.optim.Optimizer],
        timeout_s: float,
    ) -> None:
        self._names = names
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._modules = [unwrapped(stage.submod) for stage in ranks.pipeline.stages.values()]
        named = names.all_names(self._modules)
        self._optimizers = [OptimizerState(optimizer, named) for optimizer in optimizers]

    @doing("in saving a checkpoint")
    def save(
        self, path: Path, extra: Mapping[str, Any], writers: dist.ProcessGroup | None
    ) -> Saving:
        """Write the state of all ranks, which must all call this.

        With `writers`, a group for this alone, it is written while the caller goes on.
        """
        ranks, error = self._ranks, None
        state: dict[str, Tensor] = {}
        settings: dict[str, Any] = {}
        incomplete = path
        try:
            state = dict(self._tensors())
            known = {k: v for each in self._optimizers for k, v in each.settings().items()}
            _as_json([with_any_keys(dict(extra)), known])
            settings = known  # They can be sent.
            if not ranks.are_threads and ranks.processes() is None:
                raise CheckpointError(
                    "some processes are not in the mesh of this model. Expected all of them in it, "
                    "or one pipeline."
                )
            incomplete = begin_folder(path, marked_by=_FILE) if ranks.is_first else path
        except Exception as failed:
            error = failed
        found = ranks.gather((describe_error(error), settings, str(incomplete)), _SAVING)
        _raise_first([problem for problem, _, _ in found], path, error)
        incomplete = Path(next(name for _, _, name in found if name != str(path)))
        groups = join_settings([each for _, each, _ in found])
        text = _as_json(
            {"format": _FORMAT, "optimizer": groups, "extra": with_any_keys(dict(extra))}
        )

        def complete() -> None:
            if ranks.is_first:
                (incomplete / _FILE).write_text(text)
                if (old := complete_folder(incomplete, path)) is not None:
                    shutil.rmtree(old, ignore_errors=True)

        done: Future[None] = Future()
        saving = Saving(path, ranks, done, self._timeout_s)
        if writers is not None:
            begun = state_dict_saver.async_save(
                state, checkpoint_id=incomplete, process_group=writers
            )
            _follow(begun, done, complete)
            return saving
        try:
            self._write(state, incomplete)
            complete()
            done.set_result(None)
        except _FAILURES as failed:
            done.set_exception(failed)
        saving.wait()
        return saving

    @doing("in loading a checkpoint")
    def load(self, path: Path) -> dict[str, Any]:
        """Read the state of all ranks, which must all call this; return the `extra` of `save`."""
        error: BaseException | None = None
        extra: dict[str, Any] = {}
        try:
            if self._ranks.is_first:
                restore_folder(path)
        except OSError as failed:
            error = failed
        self._ranks.gather(None, _LOADING)  # Before others look for it.
        try:
            if error is None:
                extra = self._load(path)
        except _FAILURES as failed:
            error = failed
        problem = self._ranks.first_problem(_cause(error), _LOADING)
        if isinstance(error, CheckpointError):
            raise error
        if problem:
            raise _unread(path, problem) from error
        return extra

    def _load(self, path: Path) -> dict[str, Any]:
        described = read_description(path)
        stored = CheckpointReader(path).read_metadata().state_dict_metadata

        def read(state: dict[str, Tensor]) -> None:
            with _quietly():
                # This fills the given tensors in place, so it sets the parameters.
                state_dict_loader.load(state, storage_reader=CheckpointReader(path), no_dist=True)

        self.fill(path, stored, described["optimizer"], read)
        extra: dict[str, Any] = described["extra"]
        return extra

    def fill(
        self,
        path: Path,
        stored: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        read: Callable[[dict[str, Tensor]], None],
    ) -> None:
        """Let `read` fill this rank's tensors, by their keys, and give them to its optimizers.

        `stored` has the metadata of what there is, and `groups` the settings of the optimizers;
        `path` names both in errors.
        """
        in_model = {key.removeprefix("model.") for key in stored if key.startswith("model.")}
        if unknown := sorted(in_model - self._names.saved):
            raise CheckpointError(
                f"{path} has {unknown[0]!r}, which the model does not have. Expected one that was "
                "saved of a model with the same names: make the model as it was then."
            )
        loaded = [each.prepare(path, stored, groups) for each in self._optimizers]
        state = dict(self._weights())
        for each in loaded:
            state |= each.tensors()
        read(state)
        self._fill_copies(state)
        for each in loaded:
            each.use()

    def held(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all tensors of this rank, by their keys, and the settings of its optimizers."""
        tensors = dict(self._weights())
        settings: dict[str, Any] = {}
        for optimizer in self._optimizers:
            tensors |= dict(optimizer.tensors())
            settings |= optimizer.settings()
        return tensors, settings

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank saves: buffers, which replicas may have differently, only once."""
        buffers: set[str] = set()
        if not self._ranks.is_writer:
            buffers = {
                f"model.{name}"
                for module in self._modules
                for name, value in module.named_buffers(remove_duplicate=False)
                if not is_dtensor(value)
            }
        yield from ((name, value) for name, value in self._weights() if name not in buffers)
        for optimizer in self._optimizers:
            yield from optimizer.tensors()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's weights and buffers; of copies, only the first."""
        seen = set()
        for module in self._modules:
            for name, value in module.state_dict().items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{name!r} of the model's state is a {type(value).__name__}. Expected "
                        "tensors: keep what get_extra_state() returns in `extra`."
                    )
                if name not in seen:
                    seen.add(name)
                    yield f"model.{name}", value

    @torch.no_grad()
    def _fill_copies(self, loaded: Mapping[str, Tensor]) -> None:
        """Give the other copies of a parameter on this rank what the first has loaded."""
        seen = set()
        for module in self._modules:
            for name, value in module.state_dict().items():
                if name in seen:
                    value.copy_(loaded[f"model.{name}"])
                seen.add(name)

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        if not self._ranks.are_threads:
            group = None if self._ranks.peers else self._ranks.group
            with _quietly():
                state_dict_saver.save(state, checkpoint_id=path, process_group=group)
            return
        states = self._ranks.gather(state, _SAVING)  # Threads see each other's tensors.
        if self._ranks.is_first:
            whole = {name: tensor for part in states for name, tensor in part.items()}
            with _quietly():
                state_dict_saver.save(whole, checkpoint_id=path, no_dist=True)


def _follow(begun: Any, done: "Future[None]", complete: Callable[[], None]) -> None:
    """Let `done` end like the future `begun`, once the folder is complete too."""

    def end(future: Any) -> None:
        try:
            future.result()
            complete()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    begun.add_done_callback(end)


def read_description(path: Path) -> dict[str, Any]:
    described = json.loads((path / _FILE).read_text())
    if described["format"] != _FORMAT:
        raise ValueError(f"{_FILE} has another format")
    extra = without_keys_apart(described["extra"])
    return {"optimizer": list(described["optimizer"]), "extra": dict(extra)}


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra, or a setting of the optimizer, cannot be saved: {error}. Expected numbers, "
            "texts, lists and dicts of them."
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide torch's warning that ranks do not read together, since that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _raise_together(error: BaseException | None, path: Path, ranks: RanksTogether) -> None:
    """Raise an error on all ranks if there is one on any."""
    _raise_first([ranks.first_problem(_cause(error), _SAVING)], path, error)


def _raise_first(problems: Sequence[str], path: Path, error: BaseException | None) -> None:
    if isinstance(error, CheckpointError):
        raise error
    if problem := next(filter(None, problems), ""):
        raise CheckpointError(
            f"{path} could not be written: {problem}. What it had before is unchanged: mend that, "
            "or name another folder."
        ) from error


def _unread(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded: {problem}. Expected a folder that save() of this model has "
        "written."
    )


def _cause(error: BaseException | None) -> BaseException | None:
    """Return the error of the first rank that failed, of those that torch has gathered."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
