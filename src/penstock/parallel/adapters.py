"""LoRA adapters of PEFT: added to a model in a folder, and named as PEFT saves them."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.cutting.model_names import install
from penstock.errors import PretrainedError
from penstock.extras import needed_by
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.safetensors_folder import SafetensorsFolder
from penstock.parallel.transformers_parts import Conversion, skeleton_of

WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"


def peft_part(module: str = "") -> Any:
    """Return a module of PEFT."""
    with needed_by("A LoRA adapter", ["peft"], extra="hf", error=PretrainedError):
        return import_module(f"peft.{module}" if module else "peft")


def is_of_peft(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT; this does not load PEFT."""
    return any(base.__module__ == "peft.peft_model" for base in type(model).__mro__)


def add_adapter(pretrained: Pretrained, adapter: Any, seed: int) -> Pretrained:
    """Return a model with an adapter, all on the meta device, and how its tensors are found."""
    peft = peft_part()
    if is_of_peft(pretrained.model):
        raise PretrainedError(
            "this model has an adapter already. Expected one: call with_adapter() on what "
            "load_pretrained() returns."
        )
    folder = Path(adapter) if isinstance(adapter, str | PathLike) else None
    config = adapter if folder is None else _read_config(folder)
    if not isinstance(config, peft.LoraConfig):
        raise PretrainedError(
            f"adapter is a {type(config).__name__}. Expected a peft.LoraConfig, or a folder that "
            "PEFT has saved a LoRA adapter to; other kinds of adapters were not tried."
        )
    config = copy.deepcopy(config)
    config.inference_mode = False
    config.base_model_name_or_path = None  # PEFT takes that of the model, which is the folder.
    base: Any = skeleton_of(pretrained.model)
    names: dict[Tensor, str] = {}
    for name, tensor in _named_tensors(base):
        names.setdefault(tensor, name)
    with torch.device("meta"):
        model: Any = peft.get_peft_model(base, config, low_cpu_mem_usage=True)
    model.train()
    _set_dtypes(model)
    base_names = {
        name: names[tensor]
        for name, tensor in _named_tensors(model)
        if tensor in names  # PEFT keeps the model's own parameters.
    }
    copied = dict(_copied_modules(model, base_names))
    base_names |= copied
    if getattr(config, "ensure_weight_tying", False):
        _tie(model, copied)
    files, given = pretrained.files, {}
    if folder is not None:
        stored = SafetensorsFolder.of(folder, WEIGHTS)
        given = {f"{folder}: {key}": entry for key, entry in stored.entries.items()}
        files = SafetensorsFolder(files.folder, files.entries | given)
    made_of = _of_the_base(pretrained, base_names)
    if folder is not None:
        forms = {key.removeprefix(f"{folder}: "): entry.on_meta() for key, entry in given.items()}
        made_of |= _of_a_folder(model, folder, forms)
    else:
        made_of |= _of_a_config(model, config, made_of, seed)

    def initial(wanted: Iterable[str]) -> dict[str, Tensor]:
        by_base = {base_names[name]: name for name in wanted}
        values = pretrained.initial(by_base)
        return {by_base[name]: value for name, value in values.items()}

    return replace(
        pretrained,
        model=model,
        files=files,
        made_of=made_of,
        initial=initial,
        skeleton=skeleton_of(model),
    )


def _read_config(folder: Path) -> Any:
    try:
        return peft_part().PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise PretrainedError(
            f"{folder} has no adapter that PEFT can read ({exc}). Expected adapter_config.json "
            f"and {WEIGHTS}, as save_pretrained() writes them."
        ) from exc


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _set_dtypes(model: nn.Module) -> None:
    """Give adapters the dtypes that they have beside values: their layers', but at least 32 bits.

    PEFT leaves them out on the meta device.
    """
    for module in model.modules():
        if isinstance(module, peft_part("tuners.lora").LoraLayer):
            found = module.get_base_layer().weight.dtype
            dtype = torch.promote_types(found, torch.float32)
            for name, own in module.named_parameters():
                if _kind_of(name) is not None:
                    install(module, name, nn.Parameter(own.detach().to(dtype), own.requires_grad))


def _copied_modules(model: nn.Module, base_names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the tensors of modules that PEFT copied to train them, with those they begin as."""
    wrapper = peft_part("utils").ModulesToSaveWrapper
    for prefix, module in model.named_modules():
        if isinstance(module, wrapper):
            for rest, _ in _named_tensors(module.original_module):
                own = f"{prefix}.modules_to_save.{_ADAPTER}.{rest}"
                yield own, base_names[f"{prefix}.original_module.{rest}"]


def _tie(model: nn.Module, copied: dict[str, str]) -> None:
    """Let copies of one tensor be one tensor too; PEFT forgets this on the meta device."""
    for prefix, module in model.named_modules():
        if isinstance(module, peft_part("tuners.lora").LoraLayer):
            weight = module.get_base_layer().weight
            num_names = sum(weight is tensor for _, tensor in _named_tensors(model))
            if num_names > 1:
                raise PretrainedError(
                    f"ensure_weight_tying is set, and {prefix!r}, which gets an adapter, shares "
                    "its weight with another layer. Expected modules_to_save for such layers: "
                    "adapters that are tied to each other were not tried."
                )
    first: dict[str, Tensor] = {}
    for name, base in copied.items():
        tensor = first.setdefault(base, model.get_parameter(name))
        install(model, name, tensor)


def _of_the_base(pretrained: Pretrained, base_names: dict[str, str]) -> dict[str, Conversion]:
    """Return how tensors are read that the model has without its adapter."""
    names: dict[str, list[str]] = {}
    for name, base in base_names.items():
        names.setdefault(base, []).append(name)
    found: dict[str, Conversion] = {}
    for known, conversion in pretrained.made_of.items():
        for name in names.get(known, ()):
            found[name] = conversion.made_as(known, name)
    return found


def saved_names(model: Any) -> dict[str, str]:
    """Return the names of an adapter's tensors in a model of PEFT, by their names in files.

    The model is on the meta device. A tensor that modules share has several names in files.
    """
    if list(model.peft_config) != [_ADAPTER]:
        raise PretrainedError(
            f"the model has the adapters {', '.join(model.peft_config)}. Expected one, that is "
            f"called {_ADAPTER!r}, as get_peft_model() makes it: save others with PEFT."
        )
    state = dict(_named_tensors(model))
    names = {id(tensor): name for name, tensor in reversed(state.items())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That embeddings which are targets are saved too.
        saved = peft_part().get_peft_model_state_dict(model, state_dict=dict(state))
    unknown = [name for name, tensor in saved.items() if id(tensor) not in names]
    if unknown:
        raise PretrainedError(
            f"PEFT saves {unknown[0]!r}, which is not a tensor of the model. Expected a LoRA "
            "adapter of matrices: save this one with PEFT, from the whole model."
        )
    return {name: names[id(tensor)] for name, tensor in saved.items()}


def _of_a_folder(model: Any, folder: Path, forms: dict[str, Tensor]) -> dict[str, Conversion]:
    """Return how an adapter's tensors are read from a folder; raise an error if they do not fit."""
    names = saved_names(model)
    state = dict(_named_tensors(model))
    missing = [name for name in names if name not in forms]
    unexpected = [name for name in forms if name not in names]
    if missing or unexpected:
        told = [f"lacks {missing[0]}"] if missing else []
        told += [f"has {unexpected[0]}, which the model does not have"] if unexpected else []
        raise PretrainedError(
            f"{folder} does not hold this adapter: it {', and it '.join(told)}. Expected an "
            "adapter that PEFT has saved for the same model."
        )
    found = {}
    for saved, name in names.items():
        if forms[saved].shape != state[name].shape:
            raise PretrainedError(
                f"{saved!r} has the shape {list(forms[saved].shape)} in {folder}, but "
                f"{list(state[name].shape)} in this model. Expected an adapter of the same model."
            )
        found[name] = _read_as(f"{folder}: {saved}", name)
    return found


def _read_as(key: str, name: str) -> Conversion:
    return Conversion((key,), (name,), lambda read: {name: read(key)})


def _of_a_config(
    model: Any, config: Any, known: dict[str, Conversion], seed: int
) -> dict[str, Conversion]:
    """Return how the tensors of a new adapter begin; raise an error where this is not known."""
    if config.init_lora_weights not in (True, "gaussian"):
        raise PretrainedError(
            f"init_lora_weights is {config.init_lora_weights!r}, which needs the values of the "
            "whole model or is random. Expected True or 'gaussian': make other adapters with PEFT, "
            "save them, and give the folder."
        )
    found = {}
    for name, tensor in model.named_parameters():
        if name not in known:
            if _kind_of(name) is None:
                raise PretrainedError(
                    f"the values that {name!r} begins with are not known here. Expected the "
                    "matrices of plain LoRA: make other adapters with PEFT, save them, and give "
                    "the folder."
                )
            found[name] = _drawn(name, tensor, config, seed)
    return found


def _kind_of(name: str) -> str | None:
    kinds = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    return next((kind for kind in kinds if kind in name.split(".")), None)


def _drawn(name: str, form: Tensor, config: Any, seed: int) -> Conversion:
    """Return how one matrix begins, as PEFT's `reset_lora_parameters` has it."""

    def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        kind, drawn = _kind_of(name), torch.zeros(form.shape, dtype=form.dtype)
        generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
        if kind == "lora_A" and config.init_lora_weights is True:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        elif kind == "lora_A":
            # The rank of this layer, which a pattern may set.
            nn.init.normal_(drawn, std=1 / form.shape[0], generator=generator)
        elif kind == "lora_embedding_B":
            nn.init.normal_(drawn, generator=generator)
        return {name: drawn}

    return Conversion((), (name,), convert)


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write adapter_config.json, as PEFT does for an adapter that is loaded to be used."""
    config = copy.deepcopy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base = type(model.get_base_model())
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
