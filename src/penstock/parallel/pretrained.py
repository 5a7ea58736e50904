"""A model in a folder, of which each rank reads its own stages' tensors and no others."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PretrainedError
from penstock.parallel.safetensors_folder import SafetensorsFolder, TensorReader
from penstock.parallel.transformers_parts import (
    Conversion,
    build_on_meta,
    find_conversions,
    initial_values,
    model_class_of,
    read_config,
    skeleton_of,
    without_ignored,
)


def load_pretrained(
    folder: str | PathLike[str],
    *,
    model_class: Any = None,
    dtype: torch.dtype | None = None,
    **config_overrides: Any,
) -> "Pretrained":
    """Describe the Hugging Face model in a folder, for `penstock.parallelize` to read it in parts.

    The folder has config.json and safetensors files, with an index or without. Only their headers
    are read here; what does not fit the model is an error. `model_class` is a class of
    transformers, by default the one that config.json names. `dtype` is that of the parameters, by
    default as in the folder. Other keyword arguments override values of the configuration.
    """
    path = Path(folder)
    if not path.is_dir():
        raise PretrainedError(
            f"{str(folder)!r} is not a folder on this machine. Expected a folder with config.json "
            "and safetensors files: download a model of the hub with huggingface_hub's "
            "snapshot_download() first."
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PretrainedError(
            f"dtype is {dtype!r}. Expected a floating dtype of torch, such as torch.bfloat16."
        )
    config = read_config(path, config_overrides)
    had_cache = getattr(config, "use_cache", None)
    files = SafetensorsFolder.of(path)
    model = build_on_meta(
        model_class or model_class_of(config, path), config, dtype or _dtype_of(config, files)
    )
    forms = {key: entry.on_meta() for key, entry in files.entries.items()}
    made_of, unexpected = find_conversions(model, forms, path)
    tensors = _sources(model, made_of, unexpected, path)
    _check_forms(model, tensors, forms, path)
    skeleton = skeleton_of(model)
    initial = partial(initial_values, skeleton)
    pretrained = Pretrained(model, path, files, tensors, initial, skeleton, had_cache)
    pretrained.check_ties()
    return pretrained


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model whose values are in a folder; `penstock.parallelize` takes it in place of a model.

    `fill` gives values to the modules of stages that were cut from `model`.
    """

    model: nn.Module
    """The model on the meta device, to be cut; it has no values."""
    folder: Path
    files: SafetensorsFolder
    made_of: Mapping[str, Conversion]
    """How each tensor of the model is read, by all of its names that files have values for."""
    initial: Callable[[Iterable[str]], dict[str, Tensor]]
    """Returns the values of buffers that no file has, by the names that it is given."""
    skeleton: nn.Module
    """A copy of the model on the meta device, which stays as it is."""
    had_cache: bool | None
    """The `use_cache` of the folder's configuration, which training sets to False."""

    def new_model(self) -> nn.Module:
        """Return a copy of the model, on the meta device too."""
        return skeleton_of(self.skeleton)

    def fill(self, module: nn.Module, device: torch.device | str) -> dict[str, Tensor]:
        """Give a stage's module its values, on a device; return those that files do not have.

        The module was cut from `model` and has its names. Tensors are read one at a time, each
        into its own memory. The buffers that are returned are for `CutModel.build_stage`.
        """
        wanted = _names_without_values(module)
        from_files: dict[str, list[str]] = {}
        computed: list[str] = []
        for names in wanted:
            known = next((name for name in names if name in self.made_of), None)
            if known is None:
                computed.append(names[0])
            else:
                from_files[known] = names
        with self.files.reading() as reader:
            done: set[str] = set()
            for known in from_files:
                if known not in done:
                    conversion = self.made_of[known]
                    values = conversion.convert(self._reading(reader, module, from_files[known][0]))
                    for target in from_files.keys() & values.keys():
                        _install(module, from_files[target], values.pop(target), device)
                        done.add(target)
        unsaved = {}
        for name, value in self.initial(computed).items():
            names = next(names for names in wanted if names[0] == name)
            own = _install(module, names, value, device)
            unsaved.update(dict.fromkeys(names, own))
        return unsaved

    def _reading(
        self, reader: TensorReader, module: nn.Module, name: str
    ) -> Callable[[str], Tensor]:
        owner, _, last = name.rpartition(".")
        dtype = getattr(module.get_submodule(owner), last).dtype
        return lambda key: reader.read(key, dtype)

    def with_adapter(self, adapter: Any, *, seed: int = 0) -> "Pretrained":
        """Return this model with a LoRA adapter of PEFT, and all of its own weights frozen.

        `adapter` is a `LoraConfig`, whose new weights are drawn by `seed` and their names, so
        they are the same for every cut; or a folder that PEFT has saved an adapter to.
        """
        # The other file builds on this one.
        from penstock.parallel.adapters import add_adapter

        return add_adapter(self, adapter, seed)

    def check_ties(self) -> None:
        """Raise an error if tensors that the model shares are in the files with other values."""
        names_of: dict[Tensor, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name in self.made_of:
                names_of.setdefault(tensor, []).append(name)
        for first, *others in names_of.values():
            for other in others:
                if not self._are_equal(self.made_of[first].sources, self.made_of[other].sources):
                    raise PretrainedError(
                        f"{self.folder} has different values for {first!r} and {other!r}, which "
                        "are one tensor by its config.json. Give tie_word_embeddings=False if "
                        "they are two: load_pretrained(folder, tie_word_embeddings=False)."
                    )

    def _are_equal(self, first: Iterable[str], second: Iterable[str]) -> bool:
        with self.files.reading() as reader:
            for one, other in zip(first, second, strict=True):
                parts = zip(reader.parts(one), reader.parts(other), strict=True)
                if one != other and not all(a.equal(b) for a, b in parts):
                    return False
        return True


def _dtype_of(config: Any, files: SafetensorsFolder) -> torch.dtype:
    """Return the dtype of a folder: as its configuration has it, or else as its first tensor."""
    stated = getattr(config, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    dtypes = [entry.dtype for entry in files.entries.values() if entry.dtype.is_floating_point]
    return dtypes[0] if dtypes else torch.get_default_dtype()


def _sources(
    model: nn.Module, made_of: dict[str, Conversion], unexpected: list[str], folder: Path
) -> dict[str, Conversion]:
    """Return how each tensor of a model is read; raise an error if the files do not fit it."""
    state = model.state_dict(keep_vars=True)
    shared: dict[Tensor, str] = {}
    for name, tensor in state.items():
        if name in made_of:
            shared.setdefault(tensor, name)
    missing = [name for name, tensor in state.items() if tensor not in shared]
    missing, unexpected = without_ignored(model, missing, unexpected)
    problems = []
    if missing:
        problems.append(f"lacks {_listed(missing)}")
    if unexpected:
        problems.append(f"has {_listed(unexpected)}, which the model does not have")
    if problems:
        raise PretrainedError(
            f"{folder} does not hold the weights of a {type(model).__name__}: it "
            f"{', and it '.join(problems)}. Expected the same tensors: give the model_class that "
            "was saved, or load it with from_pretrained(…) of transformers, and save it again."
        )
    # Files have a tensor that the model shares under one of its names.
    for name, tensor in state.items():
        if name not in made_of and tensor in shared:
            known = shared[tensor]
            made_of[name] = made_of[known].made_as(known, name)
    return made_of


def _check_forms(
    model: nn.Module,
    made_of: Mapping[str, Conversion],
    forms: Mapping[str, Tensor],
    folder: Path,
) -> None:
    state = model.state_dict()
    for conversion in {id(one): one for one in made_of.values()}.values():
        for name, value in conversion.convert(forms.__getitem__).items():
            if name in state and value.shape != state[name].shape:
                raise PretrainedError(
                    f"{name!r} has the shape {list(value.shape)} in {folder}, but "
                    f"{list(state[name].shape)} in a {type(model).__name__} of its "
                    "config.json. Expected the same: give the overrides of the configuration that "
                    "it was saved with, or the files that belong to it."
                )


def _names_without_values(module: nn.Module) -> list[list[str]]:
    """Return all names of each parameter and buffer that is on the meta device."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if tensor.is_meta:
            names.setdefault(tensor, []).append(name)
    return list(names.values())


def _install(
    module: nn.Module, names: list[str], value: Tensor, device: torch.device | str
) -> Tensor:
    """Set a tensor of a module under all of its names."""
    owner, _, last = names[0].rpartition(".")
    old = getattr(module.get_submodule(owner), last)
    own = value.detach().to(device, old.dtype).contiguous()
    if own.untyped_storage().nbytes() > own.nbytes:
        own = own.clone()  # A part of a larger tensor would keep all of it.
    if isinstance(old, nn.Parameter):
        own = nn.Parameter(own, old.requires_grad)
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, own)
    return own


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
