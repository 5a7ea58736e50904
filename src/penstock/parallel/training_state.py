"""The state of a training in a folder: weights, optimizer, and what the caller adds.

    FOLDER/
      .metadata, *.distcp    torch.distributed.checkpoint: tensors under the model's own names
      training.json          the settings of the optimizer, and `extra`

The keys are `model.<name>`, as in the model's state dict, and `optimizer.state.<name>.<kind>`. They
do not depend on stages or ranks: each rank writes what it has and reads what it needs. A folder
that is being written is called .FOLDER.partial, and is renamed when it is complete.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.comm import LocalGroup
from penstock.errors import CheckpointError
from penstock.parallel.stage_names import StageNames
from penstock.runtime import Pipeline
from penstock.stage.stage_checks import unwrapped
from penstock.torch_private import is_dtensor

_FORMAT = "penstock training state"
_FILE = "training.json"
_SAVING = "to save the training"
_UNWRITTEN = (
    "{} could not be written: {}. What it had before is unchanged: free some space, or name "
    "another folder."
)


@dataclass(frozen=True, slots=True)
class Saving:
    """A folder that is being written, or has been."""

    folder: Path
    _done: "Future[None]"

    def wait(self) -> None:
        """Wait until the folder is complete; raise an error if it could not be written."""
        try:
            self._done.result()
        except (CheckpointException, OSError) as error:
            raise _unwritten(self.folder, error) from error

    @property
    def is_done(self) -> bool:
        """True if the folder is complete, or could not be written."""
        return self._done.done()


def save(
    folder: Path,
    names: StageNames,
    pipeline: Pipeline,
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any],
    is_asynchronous: bool,
) -> Saving:
    """Write the state of all ranks, which must all call this."""
    state = dict(_state_of(names, pipeline, optimizers))
    partial = folder.with_name(f".{folder.name}.partial")
    first = next(iter(pipeline.stages.values()))
    group = first.group
    is_writer = (first.group_rank if isinstance(group, LocalGroup) else dist.get_rank()) == 0
    problem = _make_folder(partial) if is_writer else ""
    shares = pipeline.gather((_groups_of(names, pipeline, optimizers), problem), _SAVING)
    if problems := [found for _, found in shares if found]:
        raise CheckpointError(_UNWRITTEN.format(folder, problems[0]))
    groups = _joined([settings for settings, _ in shares])
    text = _as_json({"format": _FORMAT, "optimizer": groups, "extra": dict(extra)})

    def complete() -> None:
        if is_writer:
            (partial / _FILE).write_text(text)
            _replace(folder, partial)

    done: Future[None] = Future()
    if isinstance(group, LocalGroup):
        _save_from_threads(state, partial, pipeline)
        complete()
        done.set_result(None)
    elif is_asynchronous:
        dist.barrier()
        # A group of its own, as it communicates while training does. It needs CPU tensors.
        writers = dist.new_group(backend="gloo")
        begun = state_dict_saver.async_save(state, checkpoint_id=partial, process_group=writers)
        _follow(begun, done, complete)
    else:
        dist.barrier()
        try:
            with _quietly():
                state_dict_saver.save(state, checkpoint_id=partial)
        except CheckpointException as error:
            raise _unwritten(folder, error) from error
        complete()
        dist.barrier()  # No rank may look for the folder before it has its name.
        done.set_result(None)
    return Saving(folder, done)


def load(
    folder: Path,
    names: StageNames,
    pipeline: Pipeline,
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, Any]:
    """Read the state of this rank's stages; return what `save` was given as `extra`."""
    described = _read_json(folder)
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, CheckpointException) as error:
        raise _unread(folder, error) from error
    in_model = {key.removeprefix("model.") for key in stored if key.startswith("model.")}
    if unknown := sorted(in_model - names.saved):
        raise CheckpointError(
            f"{folder} has {unknown[0]!r}, which the model does not have. Expected the checkpoint "
            "of a model with the same names: make the model as it was when it was saved."
        )
    if optimizers:
        _prepare(folder, stored, described["optimizer"], names, pipeline, optimizers)
    try:
        with _quietly():
            # This fills the given tensors in place, so it sets the parameters.
            state = dict(_state_of(names, pipeline, optimizers))
            state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise _unread(folder, error) from error
    _fill_copies(state, names, pipeline, optimizers)
    extra: dict[str, Any] = described["extra"]
    return extra


def _state_of(
    names: StageNames, pipeline: Pipeline, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    for module in _modules(pipeline):
        for name, value in module.state_dict().items():
            yield f"model.{name}", value
    for optimizer in optimizers:
        for name, parameter in _named(names, pipeline, optimizer):
            for kind, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"the optimizer keeps {kind!r} of {name!r} as a {type(value).__name__}. "
                        "Expected tensors, as torch's optimizers keep their state."
                    )
                if is_dtensor(parameter) and value.numel() > 1 and not is_dtensor(value):
                    raise CheckpointError(
                        f"{name!r} is spread over ranks, but the optimizer keeps {kind!r} of it as "
                        "a plain tensor, which may differ between them. Expected a DTensor: use "
                        "an optimizer whose state has the shape of the parameter, such as AdamW."
                    )
                yield f"optimizer.state.{name}.{kind}", value


def _named(
    names: StageNames, pipeline: Pipeline, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of an optimizer with their names in the model."""
    known = {parameter: name for name, parameter in names.parameters(_modules(pipeline))}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise CheckpointError(
                    "the optimizer has a parameter that is not one of this rank's stages. Make it "
                    "with pipe.parameters(), after parallelize()."
                )
            yield known[parameter], parameter


def _groups_of(
    names: StageNames, pipeline: Pipeline, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, dict[str, Any]]:
    """Return the settings of each parameter's group, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        known = {parameter: name for name, parameter in _named(names, pipeline, optimizer)}
        for group in optimizer.param_groups:
            settings = {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            found |= {known[parameter]: settings for parameter in group["params"]}
    return found


def _joined(groups: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the groups of all ranks: each with its settings, and the names of its parameters."""
    joined: dict[str, dict[str, Any]] = {}
    for rank in groups:
        for name, settings in rank.items():
            group = joined.setdefault(_as_json(settings), {"settings": settings, "names": []})
            if name not in group["names"]:
                group["names"].append(name)
    return list(joined.values())


def _prepare(
    folder: Path,
    stored: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: StageNames,
    pipeline: Pipeline,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give the optimizers the settings that were saved, and tensors for the state to load."""
    settings = {name: group["settings"] for group in groups for name in group["names"]}
    for optimizer in optimizers:
        known = {parameter: name for name, parameter in _named(names, pipeline, optimizer)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = known[parameter]
                if name not in settings:
                    raise CheckpointError(
                        f"{folder} has no state of an optimizer for {name!r}. Expected one that "
                        "was saved with its optimizer: load it without, to load weights alone."
                    )
                optimizer.state[parameter] = _empty_state(stored, name, parameter)
            saved = [settings[known[parameter]] for parameter in group["params"]]
            if saved and any(each != saved[0] for each in saved):
                raise CheckpointError(
                    f"{folder} has different settings for parameters that are in one group of the "
                    "optimizer now. Make the same groups as when it was saved."
                )
            for key, value in (saved[0] if saved else {}).items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _empty_state(
    stored: Mapping[str, Any], name: str, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Return tensors for the state of one parameter, with the shapes that were saved."""
    prefix, state = f"optimizer.state.{name}.", {}
    for key, kept in stored.items():
        if key.startswith(prefix) and isinstance(kept, TensorStorageMetadata):
            kind, dtype = key.removeprefix(prefix), kept.properties.dtype
            if kept.size == parameter.shape and parameter.dim() > 0:
                state[kind] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                state[kind] = torch.zeros(kept.size, dtype=dtype)
    return state


@torch.no_grad()
def _fill_copies(
    loaded: Mapping[str, Tensor],
    names: StageNames,
    pipeline: Pipeline,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give all copies of a parameter on this rank what one of them has loaded."""
    for module in _modules(pipeline):
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor) and value is not loaded[f"model.{name}"]:
                value.copy_(loaded[f"model.{name}"])
    for optimizer in optimizers:
        first: dict[str, nn.Parameter] = {}
        for name, parameter in _named(names, pipeline, optimizer):
            source = first.setdefault(name, parameter)
            if source is not parameter:
                for kind, value in optimizer.state[source].items():
                    optimizer.state[parameter][kind].copy_(value)


def _save_from_threads(state: dict[str, Tensor], path: Path, pipeline: Pipeline) -> None:
    """Let rank 0 write the tensors of all ranks, which are threads of one process."""
    states = pipeline.gather(state, _SAVING)
    if 0 in [stage.group_rank for stage in pipeline.stages.values()]:
        whole = {name: tensor for part in states for name, tensor in part.items()}
        try:
            with _quietly():
                state_dict_saver.save(whole, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            raise _unwritten(path, error) from error
    pipeline.gather(None, _SAVING)  # No rank may change its tensors before they are written.


def _make_folder(partial: Path) -> str:
    """Make an empty folder; return what is wrong if it cannot be made."""
    try:
        shutil.rmtree(partial, ignore_errors=True)  # Left by a run that was stopped.
        partial.mkdir(parents=True)
    except OSError as error:
        return _cause(error)
    return ""


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


def _replace(folder: Path, partial: Path) -> None:
    """Give a complete folder its name; the one that had it stays until then."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / _FILE).read_text())
        if described["format"] != _FORMAT:
            raise ValueError("it has another format")
        return {"optimizer": list(described["optimizer"]), "extra": dict(described["extra"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unread(folder, error) from error


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, indent=1, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra, or a setting of the optimizer, cannot be saved: {error}. Expected numbers, "
            "texts, lists and dicts of them."
        ) from error


def _modules(pipeline: Pipeline) -> list[nn.Module]:
    return [unwrapped(stage.submod) for stage in pipeline.stages.values()]


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide torch's warning that ranks do not read together, since that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _unwritten(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(_UNWRITTEN.format(folder, _cause(error)))


def _unread(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be loaded: {_cause(error)}. Expected a folder that save() of this model "
        "has written."
    )


def _cause(error: BaseException) -> str:
    """Return the error of the first rank that failed, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
