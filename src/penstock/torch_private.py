"""Every private name of torch that Penstock uses. No other file names one.

Private is what has an underscore in its dotted path, and a few names that torch leaves out of its
docs. torch changes them without notice. So this module first checks that all of them are there,
and raises one error that lists those that are not.

Each name says why Penstock needs it, and after "Public:" what would replace it, if anything would.
What is read for every node, module or tensor is an `attrgetter`, which costs no second Python call.
"""

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
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import TorchError
from penstock.torch_version import REQUIREMENT, TESTED

# 1. The names, and the check. A colon ends the module that has the name.

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
    "MmBackward0": "_saved_self _raw_saved_self _saved_self_sym_sizes _saved_self_sym_strides"
    " _saved_mat2 _raw_saved_mat2 _saved_mat2_sym_sizes _saved_mat2_sym_strides",
}
NAMES = (
    "torch._C:_autograd.SavedTensor.unpack_hook",
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "torch._C:_distributed_c10d.Backend.Options._timeout",
    "torch._C:_distributed_c10d.Reducer.prepare_for_backward",
    "torch._C:_functorch.is_functorch_wrapped_tensor",
    "torch._C:_functorch.peek_interpreter_stack",
    *(f"torch._C:_functions.{node}.{name}" for node in _NODES for name in _NODES[node].split()),
    "torch._ops:OpOverload",
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.multiprocessing.reductions:StorageWeakRef",
    "torch.nn:Module._backward_hooks",
    "torch.nn:Module._backward_pre_hooks",
    "torch.nn:Module._buffers",
    "torch.nn:Module._compiled_call_impl",
    "torch.nn:Module._forward_hooks",
    "torch.nn:Module._forward_pre_hooks",
    "torch.nn:Module._modules",
    "torch.nn:Module._non_persistent_buffers_set",
    "torch.nn:Module._parameters",
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
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "torch:Tensor._backward_hooks",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch:Tensor._version",
    "torch:UntypedStorage._cdata",
    "torch:_foreach_add_",
    "torch:_is_functional_tensor",
    "torch:ops.aten._assert_tensor_metadata.default",
    "torch:ops.aten._unsafe_view.default._schema",
    "torch:ops.higher_order.wrap_with_autocast",
    "torch:ops.higher_order.wrap_with_set_grad_enabled",
)
"""Names that are there once torch is loaded."""

_ASYNC_COLLECTIVE_TENSOR = "torch.distributed._functional_collectives:AsyncCollectiveTensor"
_OPTIMIZED_MODULE = "torch._dynamo:OptimizedModule"
_REPLICATE_DDP = "torch.distributed._composable.replicate:DDP"
_REPLICATE_MODULE = "torch.distributed._composable.replicate_with_fsdp:ReplicateModule"
NAMES_LOADED_LATE = (
    _ASYNC_COLLECTIVE_TENSOR,
    _OPTIMIZED_MODULE,
    _REPLICATE_DDP,
    _REPLICATE_MODULE,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:RegisterPostBackwardFunction",
)
"""Names in modules that take seconds to load, which whoever needs them has done."""

NAMES_OF_OBJECTS = (
    "torch._dynamo:OptimizedModule._orig_mod",
    "torch.nn.parallel:DistributedDataParallel.reducer",
)
"""Attributes that only an object has, not its class: the tests look for them, a user cannot."""


def missing_names(names: Sequence[str] = NAMES) -> list[str]:
    """Return those of `names` that this torch lacks, with dots throughout."""
    return [name.replace(":", ".") for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        resolve_name(name)
    except ImportError:
        return False
    except AttributeError:
        # A class declares what only its objects have.
        owner, _, attribute = name.rpartition(".")
        try:
            return attribute in getattr(resolve_name(owner), "__annotations__", ())
        except (AttributeError, ImportError, ValueError):
            return False
    return True


def _lacking(names: Sequence[str]) -> TorchError:
    return TorchError(
        f"torch {torch.__version__} has no {', '.join(names)}. Penstock needs such private parts "
        f"of torch, and is made for those of torch {TESTED}. "
        f'Install that with: pip install "{REQUIREMENT}".'
    )


if _missing := missing_names():
    raise _lacking(_missing)


def _load(name: str) -> Any:
    """Return what one of `NAMES_LOADED_LATE` stands for."""
    try:
        return resolve_name(name)
    except (AttributeError, ImportError) as exc:
        raise _lacking([name.replace(":", ".")]) from exc


# 2. Nested values.

# Stages take and return nested tuples, lists, dicts and classes that users have registered.
# Public: none yet; optree's pytrees know other classes.
pytree = torch.utils._pytree

REGISTER_PYTREE_NODE = "torch.utils._pytree.register_pytree_node"
"""The function that messages advise for a class of the user's. Public: none yet."""

# 3. Autograd's graph.

accumulated_variable: Callable[[Node], Tensor] = attrgetter("variable")
"""The leaf that an accumulator adds to: how a walk ends at parameters. Public: none."""

grad_metadata: Callable[[Node], Any] = attrgetter("_input_metadata")
"""Shape and dtype of each gradient that a node takes. Public: none."""

sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The place of a node in the order of the forward, in which autograd adds. Public: none."""

saved_scales: Callable[[Any], tuple[Any, Any]] = attrgetter("_saved_alpha", "_saved_beta")
"""The factors of an addmm or baddbmm. Public: none, as for all that nodes save."""

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
"""How a convolution goes over its input, as `aten.convolution` takes it."""


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """Return a tensor that a node saved; None if through hooks, which unpack it only once."""
    if getattr(node, "_raw_saved_" + name).unpack_hook is not None:
        return None
    tensor: Tensor = getattr(node, "_saved_" + name)
    return tensor


def saved_layout(node: Node, name: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape and the strides of a factor, which a node knows even if it saved it not."""
    return getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")


# The hooks that tensors saved now go through, if any: where there are some, a layer must not keep
# its input by itself. Public: none.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# The innermost transform of torch.func, or None: inside of one, autograd has no graph of ours.
# Public: none.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack

FULLY_SHARDED_NODE = "RegisterPostBackwardFunctionBackward"
"""The class of the node by which fully_shard gets to know of a backward. Public: none."""

# 4. Tensors.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place; raises RuntimeError for an inference tensor.

Finds activations that were overwritten before the weight half. Public: none.
"""

tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks of `register_hook`, or None: settling runs them, the input half must not. Public: none.
"""

post_accumulate_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook`, or None. Public: none."""


def set_tensor_hooks(tensor: Tensor, hooks: Any) -> None:
    """Take off the hooks of `register_hook`, or put them back. Public: none."""
    tensor._backward_hooks = hooks


storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that tells storages apart; a storage without bytes has no `data_ptr()` of its own."""

# Tells that a storage is gone without keeping it. Public: none; it is not in torch's docs.
StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef

# Adds many small tensors in one call. Public: none.
foreach_add_ = torch._foreach_add_

# A tensor in another shape which autograd does not take for a view. Public: none.
unsafe_view = torch.ops.aten._unsafe_view.default

# Both explain why a tensor has no memory to send. Public: none.
is_functional_tensor = torch._is_functional_tensor
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor


def async_collective_tensor() -> type[Any]:
    """Return the class of tensors that a collective is still filling.

    Layers of tensor parallelism return them. Loads their module, which takes a while. Public: none.
    """
    kind: type[Any] = _load(_ASYNC_COLLECTIVE_TENSOR)
    return kind


# 5. Modules.

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters, live. Public: `named_parameters(recurse=False)`, a slower copy without
those that are None."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers, live. Public: `named_buffers(recurse=False)`, a copy."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's own children, live. Public: `named_children()`, without a child's second name."""

non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Which of its own buffers a module leaves out of its state_dict. Public: none."""

backward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks by which a module changes gradients, two dicts: a trace would lose them. Public: none.
"""

hooks_of_calls: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""All hooks that run when a module is called, four dicts. Public: none."""

compiled_call: Callable[[nn.Module], Any] = attrgetter("_compiled_call_impl")
"""What `module.compile()` has put in place of a module's call, or None. Public: none."""


def share_contents(module: nn.Module, other: nn.Module) -> None:
    """Let `module` hold the parameters, buffers and children of `other`. Public: none."""
    for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(module)[key] = vars(other)[key]


# 6. Wrappers: torch.compile and data parallelism.


def is_instance_if_loaded(value: object, name: str) -> bool:
    """Return whether `value` is of a class, named as above; False if its module is not loaded."""
    return name.partition(":")[0] in sys.modules and isinstance(value, _load(name))


def is_compiler_loaded() -> bool:
    """Return whether anything can have been compiled. Public: none that does not load it."""
    return "torch._dynamo" in sys.modules


def is_optimized_module(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` made this module. Public: none."""
    return is_instance_if_loaded(module, _OPTIMIZED_MODULE)


def original_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` was given, or None. Public: none."""
    original: nn.Module | None = getattr(module, "_orig_mod", None)
    return original


def is_replicated_by_fsdp(module: nn.Module) -> bool:
    """Return whether the `replicate` that is built on FSDP2 was called on it. Public: none."""
    return is_instance_if_loaded(module, _REPLICATE_MODULE)


def is_replicated_by_ddp(module: nn.Module) -> bool:
    """Return whether the `replicate` that is built on DDP was called on it. Public: none."""
    return is_instance_if_loaded(module, _REPLICATE_DDP)


def prepare_reducer(ddp: DistributedDataParallel) -> None:
    """Let DDP reduce in the next backward, though its forward ran in `no_sync`. Public: none."""
    ddp.reducer.prepare_for_backward([])


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the deadline in the options of an NCCL group. Public: none with options."""
    options._timeout = timeout


# 7. Tracing, and counting without values.

# The operation of a node of a traced graph, and what it says of its arguments. Public: none.
OpOverload = torch._ops.OpOverload

schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")
"""What an operation takes, returns and changes in place. Public: none."""

# A check that torch.export puts into graphs, and autocast breaks. Public: none.
assert_tensor_metadata = torch.ops.aten._assert_tensor_metadata.default

# Operations that run a graph within the graph. Public: none; they are not in torch's docs.
wrap_with_autocast = torch.ops.higher_order.wrap_with_autocast
wrap_with_set_grad_enabled = torch.ops.higher_order.wrap_with_set_grad_enabled

# Counts the bytes that operations make. Public: none; torch's docs show how to use this one.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# Runs a model on shapes alone, and the errors where shapes are not enough. Public: `with
# torch.device("meta")`, which loses the devices of tensors.
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""The logger that repeats such an error in many lines. Public: none."""

# The autograd Function of checkpoints with use_reentrant=True. Public: none.
CheckpointFunction = torch.utils.checkpoint.CheckpointFunction


@contextmanager
def calling_at_checkpoints(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at each checkpoint with use_reentrant=False, in any thread. Public: none."""
    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = noted
    try:
        yield
    finally:
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = original
