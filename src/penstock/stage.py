"""A piece of the model, and how one microbatch goes forward and backward through it."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from penstock.backward import ForwardPass, SplitEngine, stage_backward
from penstock.backward.structure import describe, tensors_in
from penstock.backward.wrappers import Wrapper, find_wrapper, is_compiled, outline
from penstock.comm import LocalGroup
from penstock.comm.pending import values_of
from penstock.errors import PipeliningShapeError, StageError
from penstock.ir import MicrobatchId, StageId
from penstock.sealed import Sealed

Group: TypeAlias = dist.ProcessGroup | LocalGroup | None
Examples: TypeAlias = Tensor | Sequence[Tensor] | None
WeightBackward: TypeAlias = Callable[[], None]


class PipelineStage(Sealed):
    """One stage: a module, its place in the pipeline, and the ranks that it talks to.

    Shapes and dtypes between stages are learned in the first step. `input_args` and `output_args`
    are examples of one microbatch's tensors; if they are given, every microbatch must be like
    them. With `dynamic_shapes` every microbatch may differ, which costs two small messages each.

    `dw_builder` is for a module that computes its weight gradients by itself: it is called after
    each backward of the stage and returns what the weight backward has to run.

    `tied` is for parameters that other stages hold too: by their names in the module, the names
    that they share with the others'.

    `skips_out` is for outputs that skip stages: by stage, after the next one, how many of the
    last outputs go there, the furthest last. `skips_in` is the other end: by stage, before the
    previous one, how many of the first arguments come from there, the first stage's first.

    `cut` describes the cut of the model that the stage is a piece of; it must be the same for all
    stages.

    Between steps, `submod` can be replaced, and its modules can be added, wrapped, converted or
    compiled: each step looks at them again.
    """

    settable = ("submod", "dw_builder")

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: StageId,
        num_stages: int,
        device: torch.device | str,
        input_args: Examples = None,
        output_args: Examples = None,
        output_grads: Tensor | Sequence[Tensor | None] | None = None,
        input_grads: Tensor | Sequence[Tensor | None] | None = None,
        group: Group = None,
        dw_builder: Callable[[], WeightBackward] | None = None,
        *,
        dynamic_shapes: bool = False,
        tied: Mapping[str, str] | None = None,
        skips_in: Mapping[StageId, int] | None = None,
        skips_out: Mapping[StageId, int] | None = None,
        cut: str = "",
    ) -> None:
        theirs = frozenset(self.__dict__)
        _check_place(stage_index, num_stages)
        self._submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.group_rank, self.group_size = _place_in(group)
        self.dw_builder = dw_builder
        self.dynamic_shapes = dynamic_shapes
        self.tied = _check_tied(stage_index, submodule, {} if tied is None else tied)
        self.skips_in = _check_skips("skips_in", stage_index, skips_in, range(stage_index - 1))
        later = range(stage_index + 2, num_stages)
        self.skips_out = _check_skips("skips_out", stage_index, skips_out, later)
        self.cut = cut
        self._input_args = _as_examples("input_args", input_args, input_grads)
        self._output_args = _as_examples("output_args", output_args, output_grads)
        self._engine: SplitEngine | None = None
        self._outline: list[tuple[Any, ...]] = []
        self._is_compiled = False
        self._wrapper: tuple[str, Wrapper] | None = None
        self.refresh()
        self._seal(theirs)

    @property
    def submod(self) -> nn.Module:
        """The module, which may be replaced between steps."""
        return self._submod

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        _check_tied(self.stage_index, module, self.tied)
        self._submod = module

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very module: a copy finds it out anew."""
        return self.__dict__ | {"_engine": None, "_outline": []}

    def refresh(self) -> None:
        """Find out how the module is made up now: it may have changed since the last step."""
        found = outline(self._submod)
        if found == self._outline:
            if self._engine is not None:
                self._engine.refresh()
            return
        self._engine = None
        self._is_compiled = any(map(is_compiled, self._submod.modules()))
        self._wrapper = find_wrapper(self._submod)
        for option in ("find_unused_parameters", "static_graph"):
            if self._ddp is not None and getattr(self._ddp, option):
                raise StageError(
                    f"stage {self.stage_index} is wrapped in DistributedDataParallel with "
                    f"{option}=True, which looks for parameters in a graph that a pipeline does "
                    "not give it. Leave that out, and let every parameter be used."
                )
        self._outline = found

    def check_wrappers(self, *, is_split: bool) -> None:
        """Raises if gradients would come out wrong; `is_split`: in a backward of two halves."""
        if self._wrapper is None:
            return
        name, wrapper = self._wrapper
        if wrapper.takes_full_backwards and not is_split:
            return
        where = f"its module {name!r} has" if name else "it has"
        remedy = (
            "Use a schedule with full backwards, such as 1F1B or Interleaved1F1B"
            if wrapper.takes_full_backwards
            else "Use fully_shard with a schedule of full backwards, such as 1F1B"
        )
        raise StageError(
            f"stage {self.stage_index} on rank {self.group_rank}: {where} {wrapper.name}, which "
            f"gives wrong gradients in {'a split backward' if is_split else 'a pipeline'}. "
            f"{remedy}; or wrap the whole stage in DistributedDataParallel, which works with every "
            "schedule."
        )

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {self.device})"

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the module is compiled, so that its backward cannot be split."""
        return self._is_compiled

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """The module's data-parallel wrapper, which may be put around it later than the stage."""
        return self.submod if isinstance(self.submod, DistributedDataParallel) else None

    @property
    def is_data_parallel(self) -> bool:
        """Whether DistributedDataParallel reduces the gradients of the module."""
        return self._ddp is not None

    @property
    def is_reduced(self) -> bool:
        """Whether a wrapper averages the gradients of the module over replicas."""
        return self._ddp is not None or self._wrapper is not None

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the stage's gradients are averaged, if they are."""
        if self._ddp is not None:
            return self._ddp.process_group
        if self._wrapper is None:
            return None
        meshes = {p.device_mesh for p in self._submod.parameters() if hasattr(p, "device_mesh")}
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            raise StageError(
                f"stage {self.stage_index} on rank {self.group_rank} is sharded over several "
                "meshes, or one of several dimensions, and does not say over which ranks the "
                "batch is spread. Give the pipeline the replica_group."
            )
        group: dist.ProcessGroup = mesh.get_group()
        return group

    def tied_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Parameters that other stages hold too: each with its name here, and the shared one."""
        module = _unwrapped(self.submod)
        for param_name, name in self.tied.items():
            yield param_name, name, module.get_parameter(param_name)

    def share_out(self, mb: MicrobatchId, outputs: Any) -> list[tuple[Any, ...]]:
        """The outputs as arguments: for the next stage, then for each one in `skips_out`."""
        arguments = as_arguments(outputs)
        if not self.skips_out:
            return [arguments]
        num_skipping = sum(self.skips_out.values())
        if len(arguments) < num_skipping:
            raise PipeliningShapeError(
                f"stage {self.stage_index}, microbatch {mb}: {len(arguments)} outputs, but "
                f"skips_out has {num_skipping}. Let the module return a tuple with those last."
            )
        return shares_of(arguments, self.skips_out)

    def check_inputs(self, mb: MicrobatchId, args: tuple[Any, ...]) -> None:
        """Raises if the arguments are not like the `input_args` that were given."""
        if self._input_args is not None:
            _check_like(self._input_args, args, f"stage {self.stage_index}, microbatch {mb}: input")

    def check_outputs(self, mb: MicrobatchId, outputs: Any) -> None:
        """Raises if the outputs are not like the `output_args` that were given."""
        if self._output_args is not None:
            place = f"stage {self.stage_index}, microbatch {mb}: output"
            _check_like(self._output_args, outputs, place)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward without a backward."""
        with torch.no_grad():
            return self.submod(*args, **kwargs)

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_split: bool
    ) -> "StagePass":
        """A forward whose backward follows: in two halves if `is_split`."""
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            if not is_split or self.dw_builder is not None:
                return _WholePass(self, self.submod(*args, **kwargs), tensors_in((args, kwargs)))
            if self._engine is None:
                self._engine = SplitEngine(self.submod)
            return _SplitPass(self, self._engine.forward(*args, **kwargs))

    def expect_last_grads(self) -> None:
        """Let a data-parallel wrapper reduce gradients in the backward that comes next."""
        if self._ddp is not None:
            self._ddp.reducer.prepare_for_backward([])


class _WholePass:
    """A microbatch between its forward and its backward, in plain autograd."""

    def __init__(self, stage: PipelineStage, outputs: Any, inputs: list[Tensor]) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self._dw_builder = stage.dw_builder

    def backward(
        self, grads: Any, loss: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """The gradients of `inputs`, and what the weight backward has to run.

        `grads` are those of the outputs, or of the loss if there is one.
        """
        roots = self.outputs if loss is None else loss
        input_grads = stage_backward(roots, grads, self.inputs)
        return input_grads, do_nothing if self._dw_builder is None else self._dw_builder()

    def backward_of_nothing(self) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """As `backward`, for a microbatch whose loss does not count: all gradients are zeros."""
        self.outputs = pytree.tree_leaves(self.outputs)
        if not _can_be_nothing(self.outputs):
            return (None,) * len(self.inputs), do_nothing
        return self.backward(_zeros(self.outputs))


class _SplitPass:
    """A microbatch between its forward and its input backward, by the engine.

    The loss is computed from stand-ins for the last stage's outputs: its own graph, with the
    parameters it may have, is plain autograd's, and ends where the engine's begins. Only where
    the outputs are in an object that torch cannot look into are the two one graph.
    """

    def __init__(self, stage: PipelineStage, forward: ForwardPass) -> None:
        self.outputs = forward.outputs
        self.inputs = forward.inputs
        self._forward = forward
        self._stand_ins: list[Any] = []
        leaves, structure = pytree.tree_flatten(self.outputs if stage.is_last else None)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            self._stand_ins = [
                stand_in_for(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            self.outputs = pytree.tree_unflatten(self._stand_ins, structure)
            forward.outputs = leaves  # A list can hold None for a gradient; not all outputs can.

    def backward(
        self, grads: Any, loss: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """As a whole pass's; the weight gradients are what the weight backward has to run."""
        if loss is None:
            input_grads, pending = self._forward.backward_input(grads)
        elif not self._stand_ins:
            input_grads, pending = self._forward.backward_input(loss=loss * grads)
        else:
            torch.autograd.backward(loss, grads)
            output_grads = list(map(_grad_of, self._stand_ins))
            if all(grad is None for grad in output_grads):
                return (None,) * len(self.inputs), do_nothing
            input_grads, pending = self._forward.backward_input(output_grads)
        return input_grads, pending.run

    def backward_of_nothing(self) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
        """As a whole pass's."""
        outputs = self._stand_ins or pytree.tree_leaves(self._forward.outputs)
        self._forward.outputs = pytree.tree_leaves(self._forward.outputs)
        if not _can_be_nothing(outputs):
            return (None,) * len(self.inputs), do_nothing
        return self.backward(_zeros(outputs))


StagePass: TypeAlias = _WholePass | _SplitPass


def build_stage(
    stage_module: nn.Module,
    stage_index: StageId,
    num_stages: int,
    device: torch.device | str,
    group: Group = None,
) -> PipelineStage:
    """A stage of a module that was cut out of a model."""
    return PipelineStage(stage_module.to(device), stage_index, num_stages, device, group=group)


def as_arguments(outputs: Any) -> tuple[Any, ...]:
    """What the next stage is called with: a tuple or list is spread over its arguments."""
    return tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)


def shares_of(
    arguments: tuple[Any, ...], skips_out: Mapping[StageId, int]
) -> list[tuple[Any, ...]]:
    """What goes to the next stage, and the last arguments, as many as each skip takes."""
    rest = iter(arguments)
    counts = [len(arguments) - sum(skips_out.values()), *skips_out.values()]
    return [tuple(islice(rest, count)) for count in counts]


def as_outputs(arguments: tuple[Any, ...], like: Any) -> Any:
    """The other way: what mirrors the next stage's arguments, as it mirrors the outputs."""
    return arguments if type(like) in (tuple, list) else arguments[0]


def needs_grad(leaf: Any) -> bool:
    """Whether this is a tensor to differentiate by."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def do_nothing() -> None:
    """The weight backward of a stage whose backward ran in one piece."""


def stand_in_for(tensor: Tensor) -> Tensor:
    """A leaf with the same values, at which a graph ends."""
    return values_of(tensor).requires_grad_(tensor.requires_grad)


def _can_be_nothing(outputs: Sequence[Any]) -> bool:
    """Return whether an output needs a gradient; raises if nobody can tell."""
    if not any(isinstance(leaf, Tensor) for leaf in outputs):
        raise StageError(
            "a microbatch has weight 0, and the last stage returns an object that torch cannot "
            "look into, so that it cannot be told which gradients are zero. Return tensors, "
            "tuples or dicts, or register its class with torch.utils._pytree."
            "register_pytree_node."
        )
    return any(map(needs_grad, outputs))


def _zeros(outputs: Sequence[Any]) -> list[Tensor | None]:
    """A gradient of zeros for each output that needs one."""
    return [torch.zeros_like(leaf) if needs_grad(leaf) else None for leaf in outputs]


def _grad_of(stand_in: Any) -> Tensor | None:
    """Its gradient; taken, so that the stand-in does not keep it."""
    if not isinstance(stand_in, Tensor):
        return None
    grad, stand_in.grad = stand_in.grad, None
    return grad


def _place_in(group: Group) -> tuple[int, int]:
    """The rank in the group, and the number of its ranks."""
    if isinstance(group, LocalGroup):
        return group.rank, group.num_ranks
    if not (dist.is_available() and dist.is_initialized()):
        raise StageError(
            "The stage has no group, and torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group() first, or run the ranks in this process "
            "with penstock.local_ranks() and give the stage its group."
        )
    return dist.get_rank(group), dist.get_world_size(group)


def _check_place(stage_index: StageId, num_stages: int) -> None:
    for name, value in (("stage_index", stage_index), ("num_stages", num_stages)):
        if not isinstance(value, int):
            raise StageError(f"{name} is {value!r}. Expected a whole number.")
    if not 0 <= stage_index < num_stages:
        raise StageError(
            f"stage_index is {stage_index}, but num_stages is {num_stages}. "
            f"Stages are numbered from 0 to num_stages - 1."
        )


def _check_tied(
    stage_index: StageId, submodule: nn.Module, tied: Mapping[str, str]
) -> dict[str, str]:
    if not isinstance(tied, Mapping) or not all(isinstance(name, str) for name in tied.values()):
        raise StageError(
            f"stage {stage_index}: tied is {tied!r}. Expected a mapping from names of parameters "
            'to the names that they share with other stages, such as {"head.weight": "embedding"}.'
        )
    known = [name for name, _ in _unwrapped(submodule).named_parameters(remove_duplicate=False)]
    for name in tied:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or known[:3]
            raise StageError(
                f"stage {stage_index}: tied names {name!r}, which is no parameter of the module. "
                f"Expected names as in named_parameters(): the closest are {close}."
            )
    return dict(tied)


def _check_skips(
    name: str, stage_index: StageId, skips: Mapping[StageId, int] | None, others: range
) -> dict[StageId, int]:
    if skips is None:
        return {}
    if not isinstance(skips, Mapping):
        raise StageError(
            f"stage {stage_index}: {name} is {skips!r}. Expected a mapping from stages to how many "
            "values go there or come from there, such as {3: 1}."
        )
    for stage, count in skips.items():
        if stage not in others or not isinstance(count, int) or count < 1:
            expected = f"from {others[0]} to {others[-1]}" if others else "none, as it has none"
            raise StageError(
                f"stage {stage_index}: {name} is {dict(skips)}. Expected how many values, by "
                f"stages that are no neighbours: {expected}."
            )
    return dict(sorted(skips.items()))


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module that was wrapped or compiled, which knows parameters by their own names."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):
        name = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"
        module = module.get_submodule(name)
    return module


def _as_examples(name: str, args: Examples, grads: Any) -> tuple[Tensor, ...] | None:
    """The examples as a tuple, checked against those of their gradients."""
    if args is None:
        return None
    examples = tuple(args) if isinstance(args, Sequence) else (args,)
    for example in examples:
        if not isinstance(example, Tensor):
            raise StageError(
                f"{name} holds a {type(example).__name__}. "
                "Expected tensors like those of one microbatch; they may be on the meta device."
            )
    found = tuple(grads) if isinstance(grads, Sequence) else (grads,)
    for number, (example, grad) in enumerate(zip(examples, found, strict=False)):
        if grad is None:
            continue
        if not isinstance(grad, Tensor) or (grad.shape, grad.dtype) != (
            example.shape,
            example.dtype,
        ):
            got = describe(grad) if isinstance(grad, Tensor) else f"a {type(grad).__name__}"
            raise StageError(
                f"{name}[{number}] is {describe(example)}, but its gradient is {got}. "
                "A gradient has the shape and dtype of its tensor."
            )
    return examples


def _check_like(examples: tuple[Tensor, ...], values: Any, place: str) -> None:
    found = tensors_in(values)
    if len(found) != len(examples):
        raise PipeliningShapeError(
            f"{place}: number mismatch: expected {len(examples)} tensors, got {len(found)}. "
            "Give the stage examples of all its tensors, or none."
        )
    for number, (example, tensor) in enumerate(zip(examples, found, strict=True)):
        remedy = "Give the stage examples like its tensors, or none."
        check_tensor(f"{place} {number}", example, tensor, remedy)


def check_tensor(place: str, expected: Any, tensor: Tensor, remedy: str) -> None:
    """Raises if a tensor has not the expected shape and dtype; says where."""
    if tensor.shape != expected.shape:
        raise PipeliningShapeError(
            f"{place}: shape mismatch: expected {tuple(expected.shape)}, "
            f"got {tuple(tensor.shape)}. {remedy}"
        )
    if tensor.dtype != expected.dtype:
        raise PipeliningShapeError(
            f"{place}: dtype mismatch: expected {expected.dtype}, got {tensor.dtype}. {remedy}"
        )
