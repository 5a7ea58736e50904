"""Every private name of torch that Penstock uses. No file outside this folder uses one.

A name is private if its dotted path has an underscore, or if torch leaves it out of its docs.
torch changes such names without notice. So this module first checks that all of them exist, and
raises one error that lists the missing ones.

Each name says why Penstock needs it, and after "Public:" what could replace it, if anything could.
A value read for every node, module or tensor is an `attrgetter`, which saves one Python call.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import TorchError
from penstock.torch_version import REQUIREMENT, is_before, versions_tested

# 1. The names, and the check. The module that has a name ends at the colon.


def missing_names(names: Sequence[str]) -> list[str]:
    """Return those of `names` that this torch lacks, with dots throughout."""
    return [name.replace(":", ".") for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        resolve_name(name)
    except ImportError:
        return False
    except AttributeError:
        # A class may only declare an attribute that its objects have.
        owner, _, attribute = name.rpartition(".")
        try:
            return attribute in getattr(resolve_name(owner), "__annotations__", ())
        except (AttributeError, ImportError, ValueError):
            return False
    return True


def newest_name(*names: str) -> str:
    """Return the first of `names` that this torch has, from the newest on; else the newest."""
    return next((name for name in names if _exists(name)), names[0])


_NODES = {
    "AccumulateGrad": "variable",
    "AddBackward0": "_saved_alpha _input_metadata _sequence_nr",
    "AddmmBackward0": "_saved_mat1 _raw_saved_mat1 _saved_mat1_sym_sizes _saved_mat1_sym_strides"
    " _saved_mat2 _raw_saved_mat2 _saved_mat2_sym_sizes _saved_mat2_sym_strides"
    " _saved_alpha _saved_beta",
    "BaddbmmBackward0": "_saved_batch1 _raw_saved_batch1 _saved_batch2 _raw_saved_batch2"
    " _saved_alpha _saved_beta",
    "BmmBackward0": "_saved_self _raw_saved_self _saved_mat2 _raw_saved_mat2",
    "ConvolutionBackward0": "_saved_input _raw_saved_input _saved_weight _raw_saved_weight"
    " _saved_stride _saved_padding _saved_dilation"
    " _saved_transposed _saved_output_padding _saved_groups",
    "TBackward0": "_sequence_nr",
    "MmBackward0": "_saved_self _raw_saved_self _saved_self_sym_sizes _saved_self_sym_strides"
    " _saved_mat2 _raw_saved_mat2 _saved_mat2_sym_sizes _saved_mat2_sym_strides",
}
# What `checkpoint` calls with use_reentrant=False: from torch 2.14 on the first, before the second,
# which later versions have too, but do not call.
_CHECKPOINT_GENERATOR = newest_name(
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
)
NAMES = (
    "torch._C:_autograd.SavedTensor.unpack_hook",
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "torch._C:_distributed_c10d.Backend.Options._timeout",
    "torch._C:_distributed_c10d.Reducer._check_reducer_finalized",
    "torch._C:_distributed_c10d.Reducer.prepare_for_backward",
    "torch._C:_functorch.is_functorch_wrapped_tensor",
    "torch._C:_functorch.peek_interpreter_stack",
    "torch._C:_is_any_autocast_enabled",
    "torch._C:_set_grad_enabled",
    *(f"torch._C:_functions.{node}.{name}" for node in _NODES for name in _NODES[node].split()),
    "torch._ops:OpOverload",
    "torch.autograd.forward_ad:_current_level",
    "torch.distributed.distributed_c10d:Backend._plugins",
    "torch.distributed.distributed_c10d:_DistributedBackendOptions",
    "torch.distributed.rendezvous:rendezvous",
    "torch.autograd.graph:_engine_run_backward",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.multiprocessing.reductions:StorageWeakRef",
    "torch.nn:Module._backward_hooks",
    "torch.nn:Module._backward_pre_hooks",
    "torch.nn:Module._buffers",
    "torch.nn:Module._call_impl",
    "torch.nn:Module._compiled_call_impl",
    "torch.nn:Module._forward_hooks",
    "torch.nn:Module._forward_pre_hooks",
    "torch.nn:Module._modules",
    "torch.nn:Module._non_persistent_buffers_set",
    "torch.nn:Module._parameters",
    "torch.nn.modules.module:_global_forward_pre_hooks",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:SUPPORTED_NODES",
    "torch.utils._pytree:TreeSpec",
    "torch.utils._pytree:keystr",
    "torch.utils._pytree:register_pytree_node",
    "torch.utils._pytree:tree_flatten",
    "torch.utils._pytree:tree_flatten_with_path",
    "torch.utils._pytree:tree_is_leaf",
    "torch.utils._pytree:tree_leaves",
    "torch.utils._pytree:tree_map",
    "torch.utils._pytree:tree_map_only",
    "torch.utils._pytree:tree_structure",
    "torch.utils._pytree:tree_unflatten",
    "torch.utils.checkpoint:CheckpointFunction",
    _CHECKPOINT_GENERATOR,
    "torch:Tensor._backward_hooks",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch:Tensor._version",
    "torch:UntypedStorage._cdata",
    "torch:_foreach_add_",
    "torch:_foreach_mul_",
    "torch:_foreach_norm",
    "torch:_is_functional_tensor",
    "torch:ops.aten._assert_tensor_metadata.default",
    "torch:ops.aten._unsafe_view.default._schema",
    "torch:ops.higher_order.wrap_with_autocast",
    "torch:ops.higher_order.wrap_with_set_grad_enabled",
)
"""Names that exist once torch is loaded."""

_ASYNC_COLLECTIVE_TENSOR = "torch.distributed._functional_collectives:AsyncCollectiveTensor"
_OPTIMIZED_MODULE = "torch._dynamo:OptimizedModule"
_REPLICATE_DDP = "torch.distributed._composable.replicate:DDP"
NAMES_LOADED_LATE = (
    _ASYNC_COLLECTIVE_TENSOR,
    _OPTIMIZED_MODULE,
    _REPLICATE_DDP,
    "torch.distributed.device_mesh:DeviceMesh._layout",
    "torch.distributed.tensor:DTensor._local_tensor",
)
"""Names in modules that take seconds to load; a program that needs them has loaded them."""

NAMES_OF_OBJECTS = (
    "torch._dynamo:OptimizedModule._orig_mod",
    "torch.nn.parallel:DistributedDataParallel.reducer",
)
"""Attributes of objects that their classes lack: only the tests can check for them."""


def _lacking(names: Sequence[str]) -> TorchError:
    return TorchError(
        f"torch {torch.__version__} has no {', '.join(names)}. Penstock needs these private names "
        f"of torch, as they are in torch {versions_tested()}. "
        f'Install one of these versions with: pip install "{REQUIREMENT}".'
    )


def _load(name: str) -> Any:
    """Return the object that one of `NAMES_LOADED_LATE` names."""
    try:
        return resolve_name(name)
    except (AttributeError, ImportError) as exc:
        raise _lacking([name.replace(":", ".")]) from exc


def check_names(names: Sequence[str]) -> None:
    """Raise one error that lists all `names` that are missing, if any are."""
    if missing := missing_names(names):
        raise _lacking(missing)


def load_names(names: Sequence[str]) -> list[Any]:
    """Return the objects that `names` name; raise one error that lists all that are missing."""
    check_names(names)
    return list(map(resolve_name, names))


def check_attributes(value: object, kind: str, names: Sequence[str]) -> None:
    """Raise one error that lists all `names` that `value`, an object of the class `kind`, lacks."""
    if missing := [name for name in names if not hasattr(value, name)]:
        raise _lacking([f"{kind.replace(':', '.')}.{name}" for name in missing])


check_names(NAMES)


# 2. Nested values.

# Stages take and return nested tuples, lists, dicts and objects of classes that users registered.
# Public: none yet; optree's pytrees know other classes.
pytree = torch.utils._pytree

REGISTER_PYTREE_NODE = "torch.utils._pytree.register_pytree_node"
"""The function that error messages recommend for a user's own class. Public: none yet."""

# 3. Autograd's graph.

# The classes of nodes, by their names. Public: `node.name()`, which takes longer than a lookup.
NODES: Any = torch._C._functions

accumulated_variable: Callable[[Node], Tensor] = attrgetter("variable")
"""The leaf that an accumulator adds to: a search of the graph ends there. Public: none."""

grad_metadata: Callable[[Node], Any] = attrgetter("_input_metadata")
"""The shape and dtype of each gradient that a node takes. Public: none."""

sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The position of a node in the forward, which decides in what order autograd adds. Public: none.
"""

saved_scales: Callable[[Any], tuple[Any, Any]] = attrgetter("_saved_alpha", "_saved_beta")
"""The factors of an addmm or baddbmm. Public: none, as for everything that nodes save."""

saved_addend_scale: Callable[[Any], Any] = attrgetter("_saved_alpha")
"""The factor of the second addend of an addition."""

saved_geometry: Callable[[Any], tuple[Any, ...]] = attrgetter(
    "_saved_stride",
    "_saved_padding",
    "_saved_dilation",
    "_saved_transposed",
    "_saved_output_padding",
    "_saved_groups",
)
"""The geometry of a convolution, in the order of the arguments of `aten.convolution`."""


class SavedTensor:
    """Readers of a tensor that a kind of node saves under this name.

    `packed_by`: the hook that unpacks it, which may run only once, or None. `layout`: its shape
    and strides, which the node of a product knows even if it did not save the tensor.
    """

    __slots__ = ("layout", "name", "packed_by", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.packed_by: Callable[[Any], Any] = attrgetter(f"_raw_saved_{name}.unpack_hook")
        self.value: Callable[[Any], Tensor] = attrgetter(f"_saved_{name}")
        self.layout: Callable[[Any], tuple[Sequence[int], Sequence[int]]] = attrgetter(
            f"_saved_{name}_sym_sizes", f"_saved_{name}_sym_strides"
        )


# The hooks that apply to tensors saved now, if any: with such hooks a layer must not hold its own
# input. Public: none.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

TRANSFORMS_REFUSE_HOOKS = "don't yet support saved tensor hooks"
"""The text by which transforms of torch.func say that such hooks are on. Public: none."""

# The innermost transform of torch.func, or None: inside one, autograd does not build our graph.
# Public: none.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack

_run_engine = torch.autograd.graph._engine_run_backward


def run_backward(
    roots: Sequence[Tensor], grads: Sequence[Tensor], wanted: Sequence[Any] | None = None
) -> Sequence[Tensor | None]:
    """Run autograd's engine from roots with these gradients, and release the graph.

    Return the gradients of `wanted`, tensors or edges, with None for those that are not reached;
    or, if it is None, add to the gradients of all leaves. Public: torch.autograd.grad and backward.
    Those check their arguments first, which takes as long as a small backward; ours are checked.
    """
    return _run_engine(
        tuple(roots),
        tuple(grads),
        False,  # Keep the graph.
        False,  # Make a graph of the gradients.
        () if wanted is None else tuple(wanted),
        allow_unreachable=True,
        accumulate_grad=wanted is None,
    )


def is_in_forward_mode() -> bool:
    """Return whether a level of forward-mode differentiation is open. Public: none."""
    return forward_ad._current_level >= 0


# Turns the recording of graphs on or off. Public: torch.no_grad, which takes twenty times as long.
set_grad_mode = torch._C._set_grad_enabled

# Whether autocast is on for any kind of device. Public: is_autocast_enabled(kind), which needs the
# kind of a tensor's device, and takes ten times as long.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

FULLY_SHARDED_NODE = "RegisterPostBackwardFunctionBackward"
"""The class of the node by which fully_shard notices a backward. Public: none."""

COMPILED_NODE = "CompiledFunctionBackward"
"""The class of the node of a graph that torch.compile has compiled. Public: none."""

# 4. Tensors.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The number of times a tensor was changed in place; an inference tensor raises RuntimeError.

Finds activations that were overwritten before the weight backward. Public: none.
"""

tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks of `register_hook`, or None: settling runs them, the input backward must not.

Public: none.
"""

grad_and_hooks: Callable[[Tensor], tuple[Tensor | None, Any, Any]] = attrgetter(
    "grad", "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The gradient, and the hooks of `register_hook` and `register_post_accumulate_grad_hook` or None.

Public: none for the hooks.
"""


def set_tensor_hooks(tensor: Tensor, hooks: Any) -> None:
    """Remove the hooks of `register_hook`, or put them back. Public: none."""
    tensor._backward_hooks = hooks


storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that identifies a storage; empty storages do not have different `data_ptr()`s."""

# Detects that a storage is gone without holding it. Public: none; it is not in torch's docs.
StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef

# Add, scale or measure many small tensors in one call. Public: none.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# Reshapes a tensor without autograd treating the result as a view. Public: none.
unsafe_view = torch.ops.aten._unsafe_view.default

# Reshapes what a linear layer has computed with its bias, as torch's own does: before torch 2.15,
# the result is a view, and changing a view in place drops the hooks on it. Public: none.
shape_fused_product: Callable[[Tensor, Sequence[int]], Tensor] = (
    Tensor.view if is_before(2, 15) else unsafe_view
)

LOADS_WAITS = not is_before(2, 15)
"""True if `_load_csv` of this torch wants a wait for each send and reduction, which others do not
know. Public: none, as loading a schedule is private."""

# Both explain why a tensor has no memory to send. Public: none.
is_functional_tensor = torch._is_functional_tensor
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor


def async_collective_tensor() -> type[Any]:
    """Return the class of tensors that a collective is still filling.

    Tensor-parallel layers return them. Loading their module takes a while. Public: none.
    """
    kind: type[Any] = _load(_ASYNC_COLLECTIVE_TENSOR)
    return kind


mesh_layout: Callable[[Any], Any] = attrgetter("_layout")
"""The place of a mesh among all ranks, which torch gives to `get_mesh`. Public: none."""


def is_async_tensor(value: object) -> bool:
    """Return whether a collective may still be filling `value`, without loading the class."""
    return is_instance_if_loaded(value, _ASYNC_COLLECTIVE_TENSOR)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor. Public, but loads slowly: until then, nothing is."""
    return type(value) is _dtensor_type()


def _dtensor_type() -> Any:
    # Without its class, a module is being loaded by another thread.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


local_shard: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
"""The part of a DTensor on this rank, which a collective may still be filling.

Public: `to_local()`, which adds a node to autograd's graph.
"""

# 5. Modules.

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters, live. Public: `named_parameters(recurse=False)`, a slower copy that
leaves out those that are None."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers, live. Public: `named_buffers(recurse=False)`, a copy."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's own children, live. Public: `named_children()`, which gives each child one name only.
"""

non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of the buffers that a module leaves out of its state_dict. Public: none."""

backward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks with which a module changes gradients, as two dicts: a trace would lose them.

Public: none.
"""

_HOOKS_OF_CALLS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
hooks_of_calls: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(*_HOOKS_OF_CALLS)
"""All hooks that run when a module is called, as four dicts. Public: none."""


def set_hooks_of_calls(module: nn.Module, hooks: Sequence[Any]) -> None:
    """Let these hooks run when a module is called, in place of those that it has. Public: none."""
    vars(module).update(zip(_HOOKS_OF_CALLS, hooks, strict=True))


# Hooks that run before the call of every module, as FlopCounterMode and CommDebugMode set them.
# Public: only functions that add one.
hooks_of_all_calls = torch.nn.modules.module._global_forward_pre_hooks

compiled_call: Callable[[nn.Module], Any] = attrgetter("_compiled_call_impl")
"""The function that `module.compile()` put in place of a module's call, or None. Public: none."""


@contextmanager
def wrapped_calls(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let calls of a module run what `wrap` makes of them, around its hooks and compiled code.

    Public: hooks of modules, which run in the compiled code of a compiled module.
    """
    own = vars(module)
    key = "_call_impl" if compiled_call(module) is None else "_compiled_call_impl"
    before = {key: own[key]} if key in own else {}
    own[key] = wrap(getattr(module, key))
    try:
        yield
    finally:
        del own[key]
        own.update(before)


def share_contents(module: nn.Module, other: nn.Module) -> None:
    """Let `module` hold the parameters, buffers and children of `other`. Public: none."""
    for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(module)[key] = vars(other)[key]


# 6. Wrappers: torch.compile and data parallelism.


def is_instance_if_loaded(value: object, name: str) -> bool:
    """Return whether `value` is of the class `name`; False if the class's module is not loaded."""
    return name.partition(":")[0] in sys.modules and isinstance(value, _load(name))


def is_compiler_loaded() -> bool:
    """Return whether anything can have been compiled. Public: none that avoids loading it."""
    return "torch._dynamo" in sys.modules


def is_optimized_module(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` made this module. Public: none."""
    return is_instance_if_loaded(module, _OPTIMIZED_MODULE)


def original_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` was given, or None. Public: none."""
    original: nn.Module | None = getattr(module, "_orig_mod", None)
    return original


def is_replicated_by_ddp(module: nn.Module) -> bool:
    """Return whether the `replicate` built on DDP was applied to `module`. Public: none."""
    return is_instance_if_loaded(module, _REPLICATE_DDP)


FSDP_MODULE = "torch.distributed.fsdp:FSDPModule"


def is_sharded_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` or `replicate` was called on it. Public, but loads slowly."""
    return is_instance_if_loaded(module, FSDP_MODULE)


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Let DDP reduce in the next backward, although its forward ran in `no_sync`. Public: none."""
    ddp.reducer.prepare_for_backward([])


def unready_parameters(ddp: DistributedDataParallel) -> list[int]:
    """Return the numbers of the parameters that DDP waits for, among those that it reduces.

    Empty if it has reduced all. Public: none; the text of an error has the numbers.
    """
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
        if found is None:
            raise
        return list(map(int, found[1].split()))
    return []


def meet_by_environment() -> tuple[Any, int, int]:
    """Return the store of a launcher's processes, this one's rank, and their number.

    Public: `init_process_group`, which makes a group of them too.
    """
    store, rank, num_ranks = next(rendezvous("env://"))
    return store, rank, num_ranks


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of an NCCL group. Public: none for options."""
    options._timeout = timeout


def make_registered_backend(
    name: str, store: Any, rank: int, num_ranks: int, timeout: timedelta
) -> Any:
    """Make a group over a backend that was registered with `Backend.register_backend`.

    Raise a KeyError if there is none of that name. Public: `new_group`, whose groups have the same
    name on two ranks only if these have made equally many groups before.
    """
    plugin = distributed_c10d.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, num_ranks, timeout)
    options = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]  # private
    options.store, options.group_rank, options.group_size = store, rank, num_ranks
    options.timeout = timeout
    return plugin.creator_fn(options, None)


# 7. Tracing, and counting without values.

# The operation of a node in a traced graph, and the description of its arguments. Public: none.
OpOverload = torch._ops.OpOverload

schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")
"""The schema of an operation: what it takes, returns and changes in place. Public: none."""

# A check that torch.export puts into graphs and that fails under autocast. Public: none.
assert_tensor_metadata = torch.ops.aten._assert_tensor_metadata.default

# Operations that run a graph within the graph. Public: none; they are not in torch's docs.
wrap_with_autocast = torch.ops.higher_order.wrap_with_autocast
wrap_with_set_grad_enabled = torch.ops.higher_order.wrap_with_set_grad_enabled

# Counts the bytes that operations allocate. Public: none; torch's docs show how to use this one.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# The mode that runs a model on shapes alone, the tensors that it makes, and its errors where shapes
# are not enough. Public: `with torch.device("meta")`, which loses the devices of tensors.
FakeTensor = torch._subclasses.fake_tensor.FakeTensor
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException

SHAPE_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""The loggers that repeat such an error over many lines. Public: none."""

# The autograd Function of checkpoints with use_reentrant=True. Public: none.
CheckpointFunction = torch.utils.checkpoint.CheckpointFunction


@contextmanager
def calling_at_checkpoints(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at each checkpoint with use_reentrant=False, in any thread. Public: none."""
    name = _CHECKPOINT_GENERATOR.rpartition(":")[2]
    original = getattr(torch.utils.checkpoint, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    setattr(torch.utils.checkpoint, name, noted)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, name, original)


# 8. The profiler.


def is_profiling() -> bool:
    """Return whether a profiler of torch runs in any thread of this process.

    Ranges are entered only then, since entering one takes microseconds. Public: none.
    """
    return torch.autograd.profiler._is_profiler_enabled
