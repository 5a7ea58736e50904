"""Modules whose parameters `fully_shard` (FSDP2) or `replicate` spreads over replicas.

FSDP2 gathers parameters, frees them and reduces gradients in hooks of every forward and backward.
A step of a pipeline has many of these, and a weight backward runs after the last hook. So the
runtime takes over for a step: the gradients of all microbatches add up in the gathered parameters,
and each group of parameters is reduced once, after the last of them.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from penstock.torch_private import is_sharded_module, own_parameters
from penstock.torch_private.fsdp2 import (
    ShardedGroup,
    backward_ending,
    finish_sharded_backward,
    is_sharded_root,
    prepare_sharded_state,
    set_backward_ending,
    sharded_state,
)


class Sharding:
    """The sharded modules under `root`; falsy if there are none.

    A step calls `begin`, then `unshard` and `reshard` where the schedule says so, `accumulate`
    after each weight backward, `reduce` after the last one, and `finish` before anyone reads the
    gradients. `abandon` ends a step that failed.
    """

    def __init__(self, root: nn.Module) -> None:
        self._sharded = [module for module in root.modules() if is_sharded_module(module)]
        self._groups = ShardedGroup.all_of(self._sharded)
        inner = {id(m) for module in self._sharded for m in module.modules() if m is not module}
        outermost = (module for module in self._sharded if id(module) not in inner)
        roots = {sharded_state(module): module for module in outermost}
        self._states, self._roots = list(roots), list(roots.values())
        self._restore: list[tuple[ShardedGroup, tuple[bool, bool, object]]] = []
        """The user's settings, which a step changes for its own time; empty between steps."""
        self._endings: list[tuple[bool, bool]] = []
        self._frees_again = True
        """False in a step that leaves parameters gathered after backwards."""
        self._is_final = True
        """False in a step whose gradients are kept for a later one to reduce."""

    def __bool__(self) -> bool:
        return bool(self._sharded)

    def replica_groups(self) -> list[dist.ProcessGroup]:
        """Return the ranks that share the parameters, by dimension of their mesh.

        Empty if groups of parameters have different meshes.
        """
        meshes = {group.mesh for group in self._groups}
        return self.all_groups() if len(meshes) == 1 else []

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return the ranks that share any parameters, by dimension of each mesh."""
        meshes = {group.mesh for group in self._groups}
        return [group for mesh in meshes for group in mesh.get_all_groups()]

    @property
    def has_unreduced_grads(self) -> bool:
        """True if gradients wait for a step that reduces them."""
        return any(group.has_unreduced_grads for group in self._groups)

    def replica_ranks(self) -> set[int]:
        """Return all ranks that share parameters, numbered among all processes."""
        return {rank for group in self._groups for rank in group.mesh.mesh.flatten().tolist()}

    def shares_with(self, other: "Sharding") -> bool:
        """Return whether a module is in both."""
        return any(module in other._sharded for module in self._sharded)

    def outside(self, root: nn.Module) -> str | None:
        """Return the name of a trainable parameter under `root` that nobody reduces, if any."""
        if all(group.mesh.size() == 1 for group in self._groups):
            return None
        inside = {(id(module), name) for group in self._groups for module, name in group.places()}
        for path, module in root.named_modules():
            for name, param in own_parameters(module).items():
                is_trained = param is not None and param.requires_grad
                if is_trained and (id(module), name) not in inside:
                    return f"{path}.{name}" if path else name
        return None

    def begin(self, *, is_scheduled: bool, frees_after_backward: bool) -> None:
        """Let gradients add up unreduced until `reduce`.

        If `is_scheduled`, the schedule says when parameters are gathered and freed. Otherwise each
        forward frees them if `reshard_after_forward` says so. A backward then does too if
        `frees_after_backward`, or else leaves them gathered for the next forward or backward.
        """
        for state in self._states:
            prepare_sharded_state(state)  # Only then is it known what the root's default means.
        self._restore = [(group, group.settings) for group in self._groups]
        self._endings = list(map(backward_ending, self._states))
        for state in self._states:
            set_backward_ending(state, (False, False))
        self._frees_again = is_scheduled or frees_after_backward
        for group, (_, frees, mesh_between) in self._restore:
            if is_scheduled:
                mesh_between = None
            frees = frees and frees_after_backward and mesh_between is not None
            group.settings = False, frees, mesh_between

    def unshard(self) -> None:
        """Start to gather all parameters; the forward or backward that needs them waits."""
        for module in self._sharded:
            module.unshard(async_op=True)  # type: ignore[operator]  # a method of FSDPModule

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for group in self._groups:
            group.free()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather what is freed now, for a weight backward that needs values of parameters.

        It is freed again, unless backwards leave parameters gathered.
        """
        freed = [group for group in self._groups if not group.is_gathered]
        for group in freed:
            group.gather()
        try:
            yield
        finally:
            if self._frees_again:
                for group in freed:
                    group.free()

    def accumulate(self) -> None:
        """Add the gradients of a microbatch up in the dtype in which they are reduced."""
        for group in self._groups:
            group.accumulate()

    def reduce(self, *, is_final: bool) -> None:
        """Start to reduce the gradients, by one collective for each group, and free parameters.

        Groups that the user has told not to reduce keep their gradients for the next step. So do
        all of them unless `is_final`.
        """
        self._put_settings_back()
        self._is_final = is_final
        if not is_final:
            for group, settings in self._restore:
                group.settings = False, settings[1], settings[2]
        for group in reversed(self._groups):
            group.end_backward()

    def endings(self) -> list[Future[float]]:
        """Return when the gathers or reductions that were just started end, once they have."""
        return [group.ending() for group in self._groups]

    def finish(self) -> None:
        """Wait for the reductions; the gradients are then in the sharded parameters."""
        if self._restore:
            for state in self._states:
                finish_sharded_backward(state)
            if not self._is_final:
                self._put_settings_back()
            self._restore, self._is_final = [], True

    def abandon(self) -> None:
        """Go back to sharded parameters after a failure, in a step or in a forward alone.

        Gradients that were not reduced yet are dropped if it was a step.
        """
        self._put_settings_back()
        held = [(group, group.grads) for group in self._groups]
        for state, root in zip(self._states, self._roots, strict=True):
            if is_sharded_root(state):  # Not before its first forward.
                root.reset_iter_state()  # type: ignore[operator]  # a method of FSDPModule
        for group, grads in held:
            group.grads = grads
        if self._restore:
            self.drop_grads()
            self._restore = []

    def drop_grads(self) -> None:
        """Drop gradients that were not reduced yet, between steps."""
        for group in self._groups:
            group.drop_grads()

    def _put_settings_back(self) -> None:
        if self._restore:
            for state, ending in zip(self._states, self._endings, strict=True):
                set_backward_ending(state, ending)
        for group, settings in self._restore:
            group.settings = settings

    def used_parameters(
        self, modules: Iterable[dict[str, nn.Parameter | None]]
    ) -> Iterator[Tensor | None]:
        """Yield the parameters of modules that forwards use, whether they are gathered now or not.

        `modules` are the live dicts of their own parameters.
        """
        gathered = {
            (id(own_parameters(module)), name): param
            for group in self._groups
            for module, name, param in group.gathered_parameters()
        }
        for own in modules:
            for name, param in own.items():
                yield gathered.get((id(own), name), param)
