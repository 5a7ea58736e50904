"""The private names of FSDP2 (`fully_shard`), by which a step takes it over.

Loading this file does not load FSDP2, which takes a while: a program that shards has loaded it.
So the names are checked when sharded modules are first looked at.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from math import inf
from operator import methodcaller
from threading import Thread
from typing import Any

from torch import Tensor, nn

from penstock.torch_private import check_attributes, check_names, missing_names

_FOLDER = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FOLDER}._fsdp_state:FSDPState"
_CONTEXT = f"{_FOLDER}._fsdp_state:FSDPStateContext"
_GROUP = f"{_FOLDER}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FOLDER}._fsdp_param:FSDPParam"

NAMES_OF_FSDP2 = (
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    f"{_FOLDER}._fsdp_param_group:RegisterPostBackwardFunction",
    f"{_STATE}._lazy_init",
    f"{_STATE}._root_post_backward_final_callback",
    *(f"{_GROUP}.{name}" for name in ("post_backward", "wait_for_unshard", "is_unsharded")),
    f"{_PARAM}._unsharded_param",
    f"{_PARAM}.reduce_dtype",
    f"{_PARAM}.sharded_param",
    f"{_PARAM}.unsharded_accumulated_grad",
)
"""Names that exist once FSDP2 is loaded."""
NAMES_BEFORE_2_15 = (
    f"{_PARAM}.accumulate_unsharded_grad_if_needed",
    f"{_PARAM}.to_accumulated_grad_if_needed",
)
"""Gradients that are reduced in another dtype add up apart from the parameter."""
NAMES_SINCE_2_15 = (f"{_PARAM}.unsharded_grad_dtype",)
"""The parameter's own gradient has the dtype in which it is reduced."""

_ATTRIBUTES = {
    _STATE: "_fsdp_param_groups _is_root _state_ctx",
    _CONTEXT: "is_last_backward",
    _GROUP: "_all_gather_result _partial_reduce_output _post_reduce_event comm_ctx fsdp_params"
    " mesh_info post_forward_mesh_info reduce_grads reshard_after_backward",
    _PARAM: "_module_info",
}
NAMES_OF_FSDP2_OBJECTS = tuple(
    f"{kind}.{name}" for kind, names in _ATTRIBUTES.items() for name in names.split()
)
"""Attributes of objects that their classes lack."""
OPTIONAL_NAMES = (
    f"{_CONTEXT}.manual_backward_finalization",
    f"{_CONTEXT}.manual_backward_finalization_active",
)
"""Attributes by which torch 2.15 lets users end a backward themselves."""

# FSDP2's own view of a module: a state, its groups of parameters, and each parameter's two forms.
# A weight backward runs after FSDP2's hooks, so what these would have done is done by hand.
# Public: none of these.
sharded_state: Callable[[nn.Module], Any] = methodcaller("_get_fsdp_state")


def _states_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the states of sharded modules, once each; check all names of FSDP2 on the way."""
    if modules:
        is_old = not missing_names(NAMES_BEFORE_2_15)
        check_names([*NAMES_OF_FSDP2, *(() if is_old else NAMES_SINCE_2_15)])
    states = list(dict.fromkeys(map(sharded_state, modules)))
    for state in states:
        _check(_STATE, [state])
        _check(_CONTEXT, [state._state_ctx])
        _check(_GROUP, state._fsdp_param_groups)
        _check(_PARAM, [param for group in state._fsdp_param_groups for param in group.fsdp_params])
    return states


def _check(kind: str, values: Iterable[object]) -> None:
    for value in values:
        check_attributes(value, kind, _ATTRIBUTES[kind].split())


def prepare_sharded_state(state: Any) -> None:
    """Find out what is the root, as the first forward would. Public: none."""
    if state._is_root is None:
        state._lazy_init()


def is_sharded_root(state: Any) -> bool:
    """Return whether FSDP2 knows this as a root: its forward has begun. Public: none."""
    return state._is_root is True


def backward_ending(state: Any) -> tuple[bool, bool]:
    """Return whether FSDP2 ends an iteration with the next backward, and whether the user does.

    Public: only setters.
    """
    context = state._state_ctx
    return context.is_last_backward, getattr(context, "manual_backward_finalization", False)


def set_backward_ending(state: Any, ending: tuple[bool, bool]) -> None:
    """Say who ends an iteration with the next backward. Public: for the root alone."""
    context = state._state_ctx
    context.is_last_backward, is_by_hand = ending
    if hasattr(context, "manual_backward_finalization"):
        context.manual_backward_finalization = is_by_hand


def finish_sharded_backward(state: Any) -> None:
    """Wait for the reductions, and end the iteration unless more backwards follow. Public: none.

    The step has started all reductions, so nothing is left for the user to end by hand.
    """
    context = state._state_ctx
    if hasattr(context, "manual_backward_finalization_active"):
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


class ShardedGroup:
    """Parameters that FSDP2 gathers and reduces together. Public: none."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def all_of(cls, modules: Sequence[nn.Module]) -> "list[ShardedGroup]":
        return [cls(group) for state in _states_of(modules) for group in state._fsdp_param_groups]

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
            is_cast = param.reduce_dtype is not None and _gathered(param) is not None
            if is_cast and _adds_up_apart(param):
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    @property
    def grads(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The gradients of the sharded and of the gathered parameters, which a reset of FSDP2
        drops from torch 2.15 on."""
        return [(param.sharded_param.grad, _unreduced(param)) for param in self._group.fsdp_params]

    @grads.setter
    def grads(self, grads: list[tuple[Tensor | None, Tensor | None]]) -> None:
        for param, (sharded, unreduced) in zip(self._group.fsdp_params, grads, strict=True):
            param.sharded_param.grad = sharded
            if (gathered := _gathered(param)) is not None:
                gathered.grad = unreduced

    def drop_grads(self) -> None:
        """Forget the gradients that have not been reduced."""
        for param in self._group.fsdp_params:
            if _adds_up_apart(param):
                param.unsharded_accumulated_grad = None
            if (gathered := _gathered(param)) is not None:
                gathered.grad = None

    @property
    def has_unreduced_grads(self) -> bool:
        """True if gradients wait for a backward that reduces them.

        Those that were reduced over shards, but not over replicas, are apart from the parameters.
        """
        return self._group._partial_reduce_output is not None or any(
            param.unsharded_accumulated_grad is not None or _unreduced(param) is not None
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
            if (gathered := _gathered(param)) is not None:
                for module, name in _places(param):
                    yield module, name, gathered


def _adds_up_apart(param: Any) -> bool:
    """Return whether this is a torch with `NAMES_BEFORE_2_15`."""
    return hasattr(param, "to_accumulated_grad_if_needed")


def _gathered(param: Any) -> Tensor | None:
    """Return the parameter that forwards use; None before it was first gathered."""
    gathered: Tensor | None = getattr(param, "_unsharded_param", None)
    return gathered


def _unreduced(param: Any) -> Tensor | None:
    return None if (gathered := _gathered(param)) is None else gathered.grad


def _places(param: Any) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    modules = [info.module, *info.shared_modules]
    return zip(modules, [info.param_name, *info.shared_param_names], strict=True)
