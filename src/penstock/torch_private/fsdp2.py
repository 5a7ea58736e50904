"""The private names of FSDP2 (`fully_shard`), by which a step takes it over.

Loading this file does not load FSDP2, which takes a while: a program that shards has loaded it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from math import inf
from operator import methodcaller
from threading import Thread
from typing import Any

from torch import Tensor, nn

# FSDP2's own view of a module: a state, its groups of parameters, and each parameter's two forms.
# A weight backward runs after FSDP2's hooks, so what these would have done is done by hand.
# Public: none of these.
sharded_state: Callable[[nn.Module], Any] = methodcaller("_get_fsdp_state")
finish_sharded_backward: Callable[[Any], None] = methodcaller("_root_post_backward_final_callback")


def prepare_sharded_state(state: Any) -> None:
    """Find out what is the root, as the first forward would. Public: none."""
    if state._is_root is None:
        state._lazy_init()


def is_sharded_root(state: Any) -> bool:
    """Return whether FSDP2 knows this as a root: its forward has begun. Public: none."""
    return state._is_root is True


def is_last_backward(state: Any) -> bool:
    """Return whether FSDP2 ends an iteration with the next backward. Public: only a setter."""
    is_last: bool = state._state_ctx.is_last_backward
    return is_last


def set_last_backward(state: Any, is_last: bool) -> None:
    """Say whether FSDP2 ends an iteration with the next backward. Public: for the root alone."""
    state._state_ctx.is_last_backward = is_last


class ShardedGroup:
    """Parameters that FSDP2 gathers and reduces together. Public: none."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def all_of(cls, modules: Sequence[nn.Module]) -> "list[ShardedGroup]":
        states = dict.fromkeys(map(sharded_state, modules))
        return [cls(group) for state in states for group in state._fsdp_param_groups]

    @property
    def mesh(self) -> Any:
        """The mesh of the replicas."""
        return self._group.mesh_info.mesh

    @property
    def settings(self) -> tuple[bool, bool, Any]:
        """True if it reduces gradients, True if it frees parameters after a backward, and the mesh
        over which it shards them between a forward and its backward; None if it keeps them."""
        group = self._group
        return group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info

    @settings.setter
    def settings(self, settings: tuple[bool, bool, Any]) -> None:
        group = self._group
        group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = settings

    @property
    def is_gathered(self) -> bool:
        gathered: bool = self._group.is_unsharded
        return gathered

    def gather(self) -> None:
        """Gather the parameters, and wait for them."""
        self._group.unshard()
        self._group.wait_for_unshard()

    def free(self) -> None:
        """Free the parameters; a gather that nobody has waited for would stay."""
        self._group.wait_for_unshard()
        self._group.reshard()

    def end_backward(self) -> None:
        """Start to reduce the gradients, or keep them for later, as the settings say.

        FSDP2 lets the computation wait until all reductions but one have ended, to hold one input
        of a reduction. Here that saves nothing: each input takes the place of its gradients.
        """
        context = self._group.comm_ctx
        usual = context.reduce_scatter_max_input_buffers
        context.reduce_scatter_max_input_buffers = inf
        try:
            self._group.post_backward()
        finally:
            context.reduce_scatter_max_input_buffers = usual

    def ending(self) -> "Future[float]":
        """Return when the gather or reduction that was started last ends, once it has ended.

        On a CPU, reductions end before `end_backward` returns, as there are no streams.
        """
        ended: Future[float] = Future()
        gather, event = self._group._all_gather_result, self._group._post_reduce_event

        def wait() -> None:
            try:
                event.synchronize()
            finally:
                ended.set_result(time.perf_counter())

        if gather is not None and gather.all_gather_work is not None:
            work = gather.all_gather_work.get_future()
            work.add_done_callback(lambda _: ended.set_result(time.perf_counter()))
        elif event is not None:
            Thread(target=wait, daemon=True).start()
        else:
            ended.set_result(time.perf_counter())
        return ended

    def accumulate(self) -> None:
        """Add the gradients of a microbatch up in the dtype in which they are reduced."""
        for param in self._group.fsdp_params:
            if param.reduce_dtype is not None and hasattr(param, "_unsharded_param"):
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    def drop_grads(self) -> None:
        """Forget the gradients that have not been reduced."""
        for param in self._group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None

    @property
    def has_unreduced_grads(self) -> bool:
        """True if gradients wait for a backward that reduces them.

        Those that were reduced over shards, but not over replicas, are apart from the parameters.
        """
        return self._group._partial_reduce_output is not None or any(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
            for param in self._group.fsdp_params
        )

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules that hold the parameters, and the names in them."""
        for param in self._group.fsdp_params:
            yield from _places(param)

    def gathered_parameters(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Yield the parameters that forwards use, once gathered: by module and name, as a module
        holds other objects while it is sharded."""
        for param in self._group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                for module, name in _places(param):
                    yield module, name, param._unsharded_param


def _places(param: Any) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    modules = [info.module, *info.shared_modules]
    return zip(modules, [info.param_name, *info.shared_param_names], strict=True)
