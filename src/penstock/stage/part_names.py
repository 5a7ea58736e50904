"""The parts of a stage that recomputations run again, as users name them."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from penstock.backward.wrappers import is_compiled
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.stage.stage_checks import unwrapped


def as_part_names(stage: StageId, recomputed: Any) -> tuple[str, ...]:
    """Return the names of parts as they were given; empty for the whole stage."""
    if recomputed is None:
        return ()
    is_list = isinstance(recomputed, Sequence) and not isinstance(recomputed, str)
    if not is_list or not recomputed or not all(isinstance(name, str) for name in recomputed):
        raise StageError(
            f"stage {stage}: recomputed is {recomputed!r}. Expected names of submodules, at least "
            'one, such as ["layers.0"]. Leave it out to recompute the whole stage.'
        )
    return tuple(recomputed)


def find_parts(stage: StageId, root: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the submodules with these names; raise an error where one cannot run by itself."""
    if not names:
        return {}
    module = unwrapped(root)
    known = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)[:3]
            raise StageError(
                f"stage {stage}: recomputed names {name!r}, which is not a submodule. Expected "
                f"names as in named_modules(): the closest are {close}."
            )
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise StageError(
                f"stage {stage}: recomputed names {name!r}, which is inside of {outer!r}, which it "
                "names too. Expected parts that do not overlap: leave one out."
            )
        if any(map(is_compiled, _around(root, module, name))):
            raise StageError(
                f"stage {stage}: recomputed names {name!r}, which is inside of a compiled module, "
                "so that its calls cannot be told apart. Compile the part itself, or name the "
                "whole compiled module."
            )
        if isinstance(module, fx.GraphModule) and name not in _called(module):
            raise StageError(
                f"stage {stage}: recomputed names {name!r}, but the stage was traced, and its "
                "graph has the operations of this module, not a call of it. Cut the model between "
                "its modules, with cut_between_modules, or leave recomputed out."
            )
        if known[name] not in found.values():  # It may have several names.
            found[name] = known[name]
    return found


def _around(root: nn.Module, module: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield all modules that a named one is inside of, from `root`, which may wrap `module`."""
    yield root
    while root is not module:
        (root,) = root.children()
        yield root
    for own in name.split(".")[:-1]:
        module = module.get_submodule(own)
        yield module


def _called(module: fx.GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes if node.op == "call_module"}
