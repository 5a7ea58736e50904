"""The names of a model's parameters and buffers, in the stages that hold them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import StageError
from penstock.torch_private import is_dtensor


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names in the whole model's state dict, which all ranks know."""

    saved: frozenset[str]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "StageNames":
        """Read the names from the modules of all stages."""
        return cls(frozenset(name for module in modules for name in module.state_dict()))

    def all_names(self, modules: Sequence[nn.Module]) -> dict[nn.Parameter, list[str]]:
        """Return all names of the parameters of some stages, that of `parameters` first."""
        found = {parameter: [name] for name, parameter in self.parameters(modules)}
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if name not in found[parameter]:
                    found[parameter].append(name)
        return found

    def parameters(self, modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of some stages, each copy with a name of its own if it has one."""
        seen: set[nn.Parameter] = set()
        used: set[str] = set()
        for module in modules:
            names: dict[nn.Parameter, list[str]] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(parameter, []).append(name)
            for parameter, known in names.items():
                if parameter not in seen:
                    name = next((name for name in known if name not in used), known[0])
                    seen.add(parameter)
                    used.add(name)
                    yield name, parameter

    def load(
        self, modules: Sequence[nn.Module], state: Mapping[str, Any], *, is_strict: bool
    ) -> None:
        """Load the parts of a state dict that some stages hold.

        Raise an error before anything is loaded if a name is missing or unknown, or if a shape
        differs.
        """
        unknown = sorted(state.keys() - self.saved)
        if is_strict and unknown:
            raise StageError(
                f"the state dict has {_listed(unknown)}, which the model does not have. Expected "
                "the names of its own state_dict(): leave out the others, or load with "
                "strict=False."
            )
        for module in modules:
            own = module.state_dict()
            missing = sorted(own.keys() - state.keys())
            if is_strict and missing:
                raise StageError(
                    f"the state dict lacks {_listed(missing)}. Expected all names of the model, or "
                    "of this rank's part: load with strict=False to keep the present values."
                )
            for name in own.keys() & state.keys():
                if isinstance(own[name], Tensor) and own[name].shape != state[name].shape:
                    raise StageError(
                        f"{name!r} has shape {tuple(state[name].shape)} in the state dict, but "
                        f"{tuple(own[name].shape)} in the model. Expected the same."
                    )
        for module in modules:
            own = module.state_dict()
            state = {n: _spread_like(own.get(n), value) for n, value in state.items()}
            module.load_state_dict(
                {name: state[name] for name in own if name in state}, strict=False
            )


def _spread_like(own: Any, given: Any) -> Any:
    """Return a whole tensor as the part that this rank holds, if it holds a part."""
    if not is_dtensor(own) or not isinstance(given, Tensor) or is_dtensor(given):
        return given
    from torch.distributed.tensor import distribute_tensor  # Late: it takes a while to load.

    return distribute_tensor(given.to(own.device), own.device_mesh, own.placements)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
