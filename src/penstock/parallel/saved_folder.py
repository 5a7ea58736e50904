"""Write the stages of a pipeline to a folder that transformers or PEFT loads.

    rank 0   make a folder beside it [1]   write [3]   index, config, tokenizer, swap [5]
    all      who holds what [2]            write [3]   has it worked everywhere? [4]  ... [6]

Each rank writes the tensors of its own stages, one after the other. The folder is put in place when
it is complete, so whoever reads it finds the old one or the new one.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.comm.collective_results import waited
from penstock.errors import PretrainedError
from penstock.ir import StageId
from penstock.parallel.adapters import WEIGHTS, is_of_peft, saved_names, write_adapter_config
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.replaced_folder import begin_folder, complete_folder
from penstock.parallel.safetensors_folder import SafetensorsFolder
from penstock.parallel.safetensors_writing import Forms, SafetensorsWriter, num_bytes
from penstock.parallel.tokenizer_files import copy_tokenizer
from penstock.parallel.transformers_parts import (
    Conversion,
    is_of_transformers,
    names_to_save,
    reverted,
    skeleton_of,
)
from penstock.torch_private import is_dtensor

Gather: TypeAlias = Callable[[Any, str], list[Any]]
"""Returns the values of all ranks, of all replicas; the text says what they wait for."""

_WHAT = "to save the model together"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


@dataclass(frozen=True, slots=True)
class SavedModel:
    """All that a folder says of a model, except for the values of its tensors."""

    skeleton: nn.Module
    """The model on the meta device."""
    origin: Path | None = None
    """The folder that it was loaded from."""
    had_cache: bool | None = None
    """The `use_cache` of the configuration that it was loaded from."""

    @classmethod
    def of(cls, model: nn.Module | Pretrained) -> "SavedModel | None":
        """Describe a model of transformers or PEFT; return None for any other model."""
        if isinstance(model, Pretrained):
            return cls(model.skeleton, model.folder, model.had_cache)
        if is_of_transformers(model) or is_of_peft(model):
            return cls(skeleton_of(model))
        return None

    def conversions(self) -> list[Conversion]:
        """Return how the tensors in files are made of the model's."""
        if is_of_peft(self.skeleton):
            return [_renaming(name, saved) for saved, name in saved_names(self.skeleton).items()]
        state = self.skeleton.state_dict()
        return reverted(self.skeleton, {name: state[name] for name in names_to_save(self.skeleton)})


def _renaming(name: str, saved: str) -> Conversion:
    return Conversion((name,), (saved,), lambda read: {saved: read(name)})


def write_pretrained(
    folder: str | PathLike[str],
    saved: SavedModel,
    stages: Mapping[StageId, Mapping[str, Tensor]],
    *,
    gather: Gather,
    is_first: bool,
    is_writer: bool = True,
) -> None:
    """Write a model to a folder; all ranks of all replicas must call it.

    `stages` has this rank's stages, each with its tensors by their names in the model. `is_first`
    is True on one rank. `is_writer` is True on one rank of those that hold the same stages, or
    shards of them: the others only take part in putting their shards together.
    """
    path = Path(os.path.abspath(folder))
    temporary = _begin(path, gather, is_first)
    error: Exception | None = None
    try:
        files = _plan(saved, stages, gather)
        for stage, tensors in sorted(stages.items()):
            error = error or _write_stage(files.get(stage, ()), tensors, temporary, is_writer)
    except Exception as exc:  # Any of them must reach the other ranks.
        error = exc
    _agree(error, path, temporary, gather, is_first)
    if is_first:
        try:
            _complete(saved, files, temporary)
            _put_in_place(temporary, path)
        except Exception as exc:  # Any of them must reach the other ranks.
            error = exc
    _agree(error, path, temporary, gather, is_first)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file's tensors that are made together, and their forms."""

    file: str
    conversion: Conversion
    forms: Forms


_Files: TypeAlias = dict[StageId, list[_Part]]


def _begin(path: Path, gather: Gather, is_first: bool) -> Path:
    """Make a folder beside the one to be written; return it on all ranks."""
    error: Exception | None = None
    temporary = path
    if is_first:
        try:
            if path.exists() and not path.is_dir():
                raise PretrainedError(
                    f"{path} is a file. Expected a folder, or a name for a new one."
                )
            temporary = begin_folder(path)
        except (OSError, PretrainedError) as exc:
            error = exc
    names = gather(str(temporary) if is_first else None, _WHAT)
    _agree(error, path, temporary, gather, is_first)
    return Path(next(name for name in names if name is not None))


def _plan(
    saved: SavedModel, stages: Mapping[StageId, Mapping[str, Tensor]], gather: Gather
) -> _Files:
    """Return what each stage writes to which file; it is the same on all ranks."""
    conversions = saved.conversions()
    needed = {name for conversion in conversions for name in conversion.sources}
    own = {
        stage: {
            name: (tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors.items()
            if name in needed
        }
        for stage, tensors in stages.items()
    }
    holders: dict[StageId, Forms] = {}
    for found in gather(own, _WHAT):
        holders.update(found)
    by_stage: dict[StageId, list[tuple[Conversion, Forms]]] = {}
    for conversion in conversions:
        holder = _holder(conversion, holders)
        forms = {
            name: torch.empty(s, dtype=d, device="meta") for name, (d, s) in holders[holder].items()
        }
        made = conversion.convert(forms.__getitem__)
        forms_made = {name: (value.dtype, tuple(value.shape)) for name, value in made.items()}
        by_stage.setdefault(holder, []).append((conversion, forms_made))
    is_adapter = is_of_peft(saved.skeleton)
    files: _Files = {}
    for number, stage in enumerate(sorted(by_stage), 1):
        count = len(by_stage)
        file = f"model-{number:05}-of-{count:05}.safetensors"
        if is_adapter:
            file = f"part-{number:05}.safetensors"
        elif count == 1:
            file = "model.safetensors"
        files[stage] = [_Part(file, conversion, forms) for conversion, forms in by_stage[stage]]
    return files


def _holder(conversion: Conversion, holders: Mapping[StageId, Forms]) -> StageId:
    """Return the first stage that has all that a conversion needs."""
    for stage in sorted(holders):
        if all(name in holders[stage] for name in conversion.sources):
            return stage
    missing = [
        name for name in conversion.sources if not any(name in own for own in holders.values())
    ]
    if missing:
        raise PretrainedError(
            f"no stage holds {missing[0]!r}, which the saved model must have. Expected stages that "
            "were cut from this model, on all ranks of the pipeline."
        )
    raise PretrainedError(
        f"{', '.join(conversion.sources)} are saved as one tensor, but no stage holds all of them. "
        "Cut the model so that one does."
    )


def _write_stage(
    parts: Sequence[_Part], tensors: Mapping[str, Tensor], folder: Path, is_writer: bool
) -> Exception | None:
    """Write a stage's file; return the error if this fails.

    Other ranks hold shards of the same tensors, so this rank takes part in putting each of them
    together even if it writes none of them, or cannot.
    """
    error: Exception | None = None
    writer: SafetensorsWriter | None = None
    try:
        if is_writer and parts:
            forms = {name: form for part in parts for name, form in part.forms.items()}
            writer = SafetensorsWriter(folder / parts[0].file, forms)
    except (OSError, PretrainedError) as exc:
        error = exc
    for part in parts:
        own = {
            name: _whole(tensors[name])
            for name in part.conversion.sources
            if writer is not None or is_dtensor(tensors[name])
        }
        if writer is not None and error is None:
            try:
                made = part.conversion.convert(own.__getitem__)
                writer.write((name, made[name]) for name in part.forms)
            except Exception as exc:  # The other ranks still put their shards together.
                error = exc
        del own
    if writer is not None:
        try:
            writer.close(is_complete=error is None)
        except OSError as exc:
            error = error or exc
    return error


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the values of all its shards."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # Of a DTensor.
    return waited(whole)


def _agree(
    error: Exception | None, path: Path, temporary: Path, gather: Gather, is_first: bool
) -> None:
    """Raise an error on all ranks if there is one on any; the folder is then as it was."""
    report = None if error is None else f"{type(error).__name__}: {error}"
    failed = [found for found in gather(report, _WHAT) if found is not None]
    if not failed:
        return
    if is_first and temporary != path:
        shutil.rmtree(temporary, ignore_errors=True)
    if isinstance(error, PretrainedError):
        raise error
    raise PretrainedError(
        f"the model cannot be saved to {path} ({failed[0]}). Expected a folder that all ranks can "
        "write to, with room for the weights; what was there is as before."
    ) from error


def _complete(saved: SavedModel, files: _Files, folder: Path) -> None:
    """Add what a folder has besides its weights."""
    parts = [part for parts in files.values() for part in parts]
    absent = [part.file for part in parts if not (folder / part.file).is_file()]
    if absent:
        raise PretrainedError(
            f"{absent[0]} was written by another rank, and is not there. Expected a folder that is "
            "shared by the machines of all ranks."
        )
    if is_of_peft(saved.skeleton):
        _join_adapter(files, folder)
        write_adapter_config(saved.skeleton, folder)
        return
    _write_index(parts, folder)
    model: Any = saved.skeleton
    config = copy.deepcopy(model.config)
    dtypes = [dtype for part in parts for dtype, _ in part.forms.values()]
    floating = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    config.dtype = str(floating).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if saved.had_cache is not None:
        config.use_cache = saved.had_cache
    config.save_pretrained(folder)
    if saved.origin is not None:
        copy_tokenizer(saved.origin, folder)
    elif model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_index(parts: Sequence[_Part], folder: Path) -> None:
    if len({part.file for part in parts}) == 1:
        return
    forms = {name: form for part in parts for name, form in part.forms.items()}
    index = {
        "metadata": {
            "total_parameters": sum(torch.Size(shape).numel() for _, shape in forms.values()),
            "total_size": num_bytes(forms),
        },
        "weight_map": {name: part.file for part in parts for name in part.forms},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text)


def _join_adapter(files: _Files, folder: Path) -> None:
    """Make one file of those of all ranks: PEFT reads only one. An adapter is small."""
    parts = [part for parts in files.values() for part in parts]
    forms = {name: form for part in parts for name, form in part.forms.items()}
    writer = SafetensorsWriter(folder / WEIGHTS, forms)
    for file in dict.fromkeys(part.file for part in parts):
        stored = SafetensorsFolder.of(folder, file)
        with stored.reading() as reader:
            names = [name for part in parts if part.file == file for name in part.forms]
            writer.write((name, reader.read(name)) for name in names)
        (folder / file).unlink()
    writer.close()


def _put_in_place(temporary: Path, path: Path) -> None:
    """Give the complete folder its name; keep what the old one has besides a saved model."""
    old = complete_folder(temporary, path)
    if old is not None:
        for entry in sorted(old.iterdir()):
            is_weight = any(entry.match(pattern) for pattern in _WEIGHT_FILES)
            if not is_weight and not (path / entry.name).exists():
                entry.rename(path / entry.name)
        shutil.rmtree(old)
