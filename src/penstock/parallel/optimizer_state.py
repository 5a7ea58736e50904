"""The state and the settings of an optimizer, under the names of the model's parameters."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.errors import CheckpointError
from penstock.torch_private import is_dtensor


class OptimizerState:
    """The state of one optimizer of this rank.

    `names` has all names of each parameter of this rank. State is saved under the first, and
    loaded by the first that a folder has: another cut may have saved a tied one by another.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, Sequence[str]]
    ) -> None:
        self._optimizer = optimizer
        self._names = names

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the state; raise an error for what cannot be saved."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._name_of(parameter)
                for kind, value in self._optimizer.state.get(parameter, {}).items():
                    yield _key(name, kind), _checked(name, parameter, kind, value)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter's group, by the parameter's name.

        Beside them is the kind of the optimizer.
        """
        found: dict[str, dict[str, Any]] = {}
        kind = _kind_of(self._optimizer)
        for group in self._optimizer.param_groups:
            settings = {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            described = {"kind": kind, "settings": settings}
            found |= {self._name_of(parameter): described for parameter in group["params"]}
        return found

    def prepare(
        self, path: Path, stored: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> "LoadedState":
        """Return tensors to load the state into; the optimizer does not change before `use`."""
        settings = {name: group["settings"] for group in groups for name in group["names"]}
        kinds = {name: group.get("kind") for group in groups for name in group["names"]}
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        named: dict[nn.Parameter, str] = {}
        for group in self._optimizer.param_groups:
            is_on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                own = self._name_of(parameter)
                name = next((n for n in self._names[parameter] if n in settings), own)
                if name not in settings:
                    raise CheckpointError(
                        f"{path} has no state of an optimizer for {name!r}. Expected one that was "
                        "saved with its optimizer: load it without, to load weights alone."
                    )
                self._check_kind(path, name, kinds[name], settings[name])
                named[parameter] = name
                states[parameter] = _empty_state(stored, name, parameter, is_on_device)
        of_groups = [
            self._settings_of(path, [settings[named[each]] for each in group["params"]])
            for group in self._optimizer.param_groups
        ]
        return LoadedState(self._optimizer, named, states, of_groups)

    def _check_kind(
        self, path: Path, name: str, kind: str | None, settings: Mapping[str, Any]
    ) -> None:
        """Raise an error if another kind of optimizer was saved; `kind` is None if unknown.

        Then its settings must tell: either may have some that the other lacks, as versions of torch
        and learning-rate schedulers add some, but not both.
        """
        own, known = _kind_of(self._optimizer), self._optimizer.defaults.keys()
        if kind is None and settings.keys() - known and known - settings.keys():
            kind = f"another, with the settings {', '.join(sorted(settings))}"
        if kind not in (None, own):
            raise CheckpointError(
                f"{path} has the state of another optimizer for {name!r}: {kind}, but the one to "
                f"load is {own}. Expected the same: make it as it was when it was saved, or load "
                "without it, to load weights alone."
            )

    def _settings_of(self, path: Path, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the settings that all parameters of a group were saved with."""
        if any(each != saved[0] for each in saved):
            raise CheckpointError(
                f"{path} has different settings for parameters that are in one group of the "
                "optimizer now. Make the same groups as when it was saved."
            )
        return dict(saved[0]) if saved else {}

    def _name_of(self, parameter: nn.Parameter) -> str:
        if parameter not in self._names:
            raise CheckpointError(
                "the optimizer has a parameter that is not one of this rank's stages. Make it with "
                "pipe.parameters(), after parallelize()."
            )
        return self._names[parameter][0]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of an optimizer while it is loaded."""

    optimizer: torch.optim.Optimizer
    named: Mapping[nn.Parameter, str]
    states: Mapping[nn.Parameter, dict[str, Tensor]]
    settings: Sequence[Mapping[str, Any]]
    """Those of each group."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to load, by their keys; of copies with one name, the first's."""
        found: dict[str, Tensor] = {}
        for parameter, state in self.states.items():
            for kind, value in state.items():
                found.setdefault(_key(self.named[parameter], kind), value)
        return found

    def use(self) -> None:
        """Give the optimizer what was loaded."""
        loaded = self.tensors()
        for parameter, state in self.states.items():
            for kind, value in state.items():
                source = loaded[_key(self.named[parameter], kind)]
                if source is not value:
                    value.copy_(source)
            self.optimizer.state[parameter] = state
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            for key, value in settings.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def join_settings(ranks: Sequence[Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the groups of all ranks: each with its kind, settings and names of parameters."""
    joined: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        for name, described in rank.items():
            key = json.dumps(described, sort_keys=True, default=repr)
            group = joined.setdefault(key, {**described, "names": {}})
            group["names"][name] = None
    return [{**group, "names": list(group["names"])} for group in joined.values()]


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, or of torch's that it is derived from.

    A wrapper, such as that of accelerate, is not a kind of its own.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    classes = type(inner).__mro__[: -len(torch.optim.Optimizer.__mro__)]
    of_torch = (each for each in classes if each.__module__.startswith("torch.optim."))
    return next(of_torch, type(inner)).__name__


def _key(name: str, kind: str) -> str:
    return f"optimizer.state.{name}.{kind}"


def _checked(name: str, parameter: nn.Parameter, kind: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"the optimizer keeps {kind!r} of {name!r} as a {type(value).__name__}. Expected "
            "tensors, as torch's optimizers keep their state."
        )
    if is_dtensor(parameter) and value.numel() > 1 and not is_dtensor(value):
        raise CheckpointError(
            f"{name!r} is spread over ranks, but the optimizer keeps {kind!r} of it as a plain "
            "tensor, which may differ between them. Expected a DTensor: use an optimizer whose "
            "state has the shape of the parameter, such as AdamW."
        )
    return value


def _empty_state(
    stored: Mapping[str, Any], name: str, parameter: nn.Parameter, is_on_device: bool
) -> dict[str, Tensor]:
    """Return tensors for the state of one parameter, with the shapes that were saved.

    What had the dtype of the weight has that of the parameter, as in `load_state_dict` of torch.
    """
    prefix, state = _key(name, ""), {}
    weight = stored.get(f"model.{name}")
    had = weight.properties.dtype if isinstance(weight, TensorStorageMetadata) else None
    device = parameter.device if is_on_device else torch.device("cpu")
    for key, kept in stored.items():
        kind = key.removeprefix(prefix)
        # Names may contain dots, so one may begin like another; kinds do not.
        if key.startswith(prefix) and "." not in kind and isinstance(kept, TensorStorageMetadata):
            dtype = kept.properties.dtype
            if kept.size == parameter.shape and kind != "step":
                dtype = parameter.dtype if dtype == had else dtype
                state[kind] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                state[kind] = torch.zeros(kept.size, dtype=dtype, device=device)
    return state
