"""Models of transformers without values: how they are built, initialised, and named in files.

Names of transformers that its guides do not describe are used here and nowhere else. They are
those of transformers 5: how from_pretrained() and save_pretrained() rename and convert tensors.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cutting.model_names import install
from penstock.errors import PretrainedError
from penstock.extras import needed_by
from penstock.torch_private import non_persistent_buffers


def transformers_part(module: str = "") -> Any:
    """Return a module of transformers."""
    with needed_by(
        "A Hugging Face model", ["transformers", "safetensors"], extra="hf", error=PretrainedError
    ):
        return import_module(f"transformers.{module}" if module else "transformers")


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether transformers defines how a model is saved; this does not load transformers."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def read_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Return the configuration of a folder, with some of its values replaced."""
    file = folder / "config.json"
    try:
        described = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise PretrainedError(
            f"{file} cannot be read as JSON ({exc}). Expected a folder as save_pretrained() of "
            "transformers writes it, with config.json and safetensors files."
        ) from exc
    if described.get("quantization_config"):
        raise PretrainedError(
            f"{folder} holds quantized weights, which stages cannot be made of. Expected weights "
            "of a floating dtype: dequantize the model with transformers, and save it."
        )
    try:
        config, unknown = transformers_part().AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, **overrides
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise PretrainedError(
            f"transformers cannot use {file}: {exc}. Expected the configuration of a model that "
            "the installed transformers knows, and overrides that fit it."
        ) from exc
    if unknown:
        raise PretrainedError(
            f"the configuration of {folder} has no {', '.join(sorted(unknown))}. Expected "
            f"keyword arguments that override values of config.json, a {type(config).__name__}."
        )
    return config


def model_class_of(config: Any, folder: Path) -> Any:
    """Return the class that the folder's configuration names."""
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers_part(), names[0], None) if names else None
    if found is None:
        told = f"names the architecture {names[0]!r}, which transformers lacks" if names else ""
        raise PretrainedError(
            f"config.json of {folder} {told or 'names no architecture'}. Give the class of the "
            "model: load_pretrained(folder, model_class=…)."
        )
    return found


def build_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model without values, in training mode, with weights tied as the config says."""
    if not hasattr(model_class, "_from_config"):
        raise PretrainedError(
            f"model_class is {model_class!r}. Expected a class of a model of transformers, such as "
            "transformers.LlamaForCausalLM."
        )
    turn_off_caches(config)
    safe = transformers_part("initialization").meta_device_safe_creation_ops
    with torch.device("meta"), safe():
        model: nn.Module = model_class._from_config(config, dtype=dtype)
    _apply_dtype_plan(model, dtype)
    return model.train()


def turn_off_caches(config: Any) -> None:
    """Turn off the caches of a model, which cannot be traced; training needs none."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "use_cache", None):
            part.use_cache = False


def _apply_dtype_plan(model: Any, dtype: torch.dtype) -> None:
    """Keep those parameters in 32 bits of which transformers says so."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    loading = transformers_part("core_model_loading")
    pattern, group_names, _ = loading.build_glob_alternation(list(plan))
    kept: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if found := pattern.search(name):
            own = kept.get(id(tensor))
            if own is None:
                own = tensor.detach().to(plan[group_names[found.lastgroup]])
                if isinstance(tensor, nn.Parameter):
                    own = nn.Parameter(own, tensor.requires_grad)
                kept[id(tensor)] = own
            install(model, name, own)


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, with the same names, ties and settings."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        own = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            own = nn.Parameter(own, tensor.requires_grad)
        memo[id(tensor)] = own
    return copy.deepcopy(model, memo)


# Names in files


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of the model that are made of tensors in files, or the other way round."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]]
    """Takes a function that returns a source by its name, and returns the targets."""

    def made_as(self, target: str, name: str) -> "Conversion":
        """Return a conversion that makes one of the targets only, under another name."""

        def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
            return {name: self.convert(read)[target]}

        return Conversion(self.sources, (name,), convert)


def find_conversions(
    model: Any, forms: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, Conversion], list[str]]:
    """Return how each tensor of a model is made of those in files, and files' unexpected names.

    `forms` has the tensors in files, on the meta device. This is what
    `convert_and_load_state_dict_in_model` of transformers does, without reading anything.
    """
    loading = transformers_part("core_model_loading")
    mapping = transformers_part("conversion_mapping").get_model_conversion_mapping(model)
    renamings, converters = _by_kind(mapping)
    by_pattern = {k: converter for converter in converters for k in converter.source_patterns}
    state = model.state_dict()
    groups: dict[str, list[tuple[str, str | None]]] = {}
    unexpected = []
    for key in sorted(forms, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = loading.rename_source_key(key, [], [], prefix, state)
        if name in state:
            groups.setdefault(name, []).append((key, pattern))
        else:
            unexpected.append(key)
    # Saving reverts those that were used, as transformers does.
    model._weight_conversions = [conversion for conversion in mapping if conversion.was_used()]
    found = {}
    for name, parts in groups.items():
        pattern = parts[0][1]
        if pattern is None:
            conversion = _renaming(name, [key for key, _ in parts], folder)
        else:
            conversion = _conversion(model, name, parts, by_pattern[pattern], forms, folder)
        found.update({target: conversion for target in conversion.targets})
    return found, unexpected


def _by_kind(mapping: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    loading = transformers_part("core_model_loading")
    entries = list(mapping)
    return (
        [entry for entry in entries if isinstance(entry, loading.WeightRenaming)],
        [entry for entry in entries if isinstance(entry, loading.WeightConverter)],
    )


def _renaming(name: str, keys: list[str], folder: Path) -> Conversion:
    if len(keys) > 1:
        raise PretrainedError(
            f"{folder} has {name!r} {len(keys)} times, as {', '.join(keys)}. Expected each tensor "
            "once: save the model with transformers again."
        )
    return Conversion((keys[0],), (name,), lambda read: {name: read(keys[0])})


def _conversion(
    model: Any,
    name: str,
    parts: list[tuple[str, str | None]],
    converter: Any,
    forms: Mapping[str, Tensor],
    where: object,
) -> Conversion:
    """Return a conversion of transformers; a trial on the meta device says what it makes."""

    def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        own = copy.deepcopy(converter)
        for key, pattern in parts:
            own.add_tensor(name, key, pattern, lambda key=key: read(key))
        made = own.convert(name, model=model, config=model.config)
        return {
            target: value[0] if isinstance(value, list) else value for target, value in made.items()
        }

    keys = tuple(key for key, _ in parts)
    try:
        targets = tuple(convert(lambda key: forms[key]))
    except Exception as exc:
        raise PretrainedError(
            f"the conversion of transformers fails for {_some(keys)} of {where} "
            f"({type(exc).__name__}: {exc}). Load the folder with from_pretrained(…) of "
            "transformers, and save it with save_pretrained(…, save_original_format=False)."
        ) from exc
    return Conversion(keys, targets, convert)


def reverted(model: Any, forms: Mapping[str, Tensor]) -> list[Conversion]:
    """Return how files' tensors are made of a model's, as `revert_weight_conversion` does it.

    `forms` has the model's tensors that are to be saved, on the meta device.
    """
    loading = transformers_part("core_model_loading")
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        get = transformers_part("conversion_mapping").get_model_conversion_mapping
        known = get(model, add_legacy=False)
        mapping = [entry for entry in known if not isinstance(entry, loading.PrefixChange)]
    renamings, converters = _by_kind(entry.reverse_transform() for entry in mapping[::-1])
    by_pattern = {k: converter for converter in converters for k in converter.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(forms, key=loading.dot_natural_key):
        target, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            target = loading.apply_renamings(name, renamings)
        groups.setdefault(target, []).append((name, pattern))
    found = []
    for target, parts in groups.items():
        pattern = parts[0][1]
        if pattern is None:
            found.append(_renaming(target, [name for name, _ in parts], Path("the model")))
            continue
        one = _conversion(model, target, parts, by_pattern[pattern], forms, "the model")
        found.append(_renamed(one, lambda name: loading.apply_renamings(name, renamings)))
    return found


def _renamed(conversion: Conversion, rename: Callable[[str], str]) -> Conversion:
    def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {rename(name): value for name, value in conversion.convert(read).items()}

    return Conversion(conversion.sources, tuple(map(rename, conversion.targets)), convert)


def without_ignored(
    model: Any, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Return missing and unexpected names, but for those that the model's class expects."""
    loading = transformers_part("modeling_utils").LoadStateDictInfo
    info = loading(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return sorted(info.missing_keys), sorted(info.unexpected_keys)


def names_to_save(model: Any) -> list[str]:
    """Return the names that save_pretrained() would write: each tied tensor once."""
    state = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    remove = transformers_part("modeling_utils").remove_tied_weights_from_state_dict
    try:
        return list(remove(state, model))
    except RuntimeError as exc:
        raise PretrainedError(
            f"transformers cannot save this model: {exc} Expected layers that share weights only "
            "where the model's class says so, in _tied_weights_keys."
        ) from exc


# Values that are not in files


def initial_values(skeleton: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the values that a model's own initialisation gives to buffers, by their names.

    `skeleton` is on the meta device and stays as it is. The other tensors of the copy that is
    initialised have no values, so they cost nothing. What is not set is found by initialising
    twice, over zeros and over ones.
    """
    wanted = list(names)
    if not wanted:
        return {}
    zeros, ones = (_initialised(skeleton, wanted, value) for value in (0, 1))
    for name in wanted:
        if not zeros[name].equal(ones[name]):
            raise PretrainedError(
                f"the buffer {name!r} of {type(skeleton).__name__} is neither in the files nor set "
                "by the model's _init_weights(), so its values are not known. Load the model with "
                "from_pretrained(…) of transformers, and cut it with its values."
            )
    return zeros


def _initialised(skeleton: Any, names: Iterable[str], value: int) -> dict[str, Tensor]:
    model = copy.deepcopy(skeleton)
    for name in names:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        old = getattr(holder, last)
        own = torch.full_like(old, value, device="cpu", requires_grad=False)
        if isinstance(old, nn.Parameter):
            own = nn.Parameter(own, old.requires_grad)
        install(model, name, own, is_persistent=last not in non_persistent_buffers(holder))
    model.initialize_weights()
    found = {name: model.get_parameter_or_buffer(name).detach() for name in names}
    return {name: tensor.cpu() for name, tensor in found.items()}


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
