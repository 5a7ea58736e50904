"""A piece of the model, at its place in the pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.backward import SplitEngine
from penstock.backward.structure import tensors_in
from penstock.backward.wrappers import is_compiled, outline
from penstock.errors import PipeliningShapeError
from penstock.ir import MicrobatchId, StageId
from penstock.sealed import Sealed
from penstock.stage.compiled_weights import warn_of_compiled_weights
from penstock.stage.dtensors import Spread
from penstock.stage.examples import Examples, as_examples, check_like
from penstock.stage.forward_contexts import ContextFactory, ForwardContexts
from penstock.stage.meshes import GetMesh, Meshes, fits, meshes_of
from penstock.stage.outputs import as_arguments, shares_of
from penstock.stage.part_names import as_part_names, find_parts
from penstock.stage.passage import (
    LatePassage,
    Passage,
    SplitPassage,
    WeightBackward,
    WholePassage,
    needs_grad,
)
from penstock.stage.stage_checks import (
    GroupOrMesh,
    as_group,
    check_place,
    check_skip_counts,
    check_tied,
    place_in,
    ranks_of,
    unwrapped,
)
from penstock.stage.wrapping import Wrapping
from penstock.torch_private import is_dtensor

_PLAIN = frozenset((Tensor,))


class PipelineStage(Sealed):
    """One stage: a module, its place in the pipeline, and the ranks that it talks to.

    Shapes and dtypes between stages are learned in the first step. `input_args` and `output_args`
    are examples of one microbatch's tensors; if they are given, every microbatch must match
    them. With `dynamic_shapes` every microbatch may differ, which costs a small message each.

    `dw_builder` is for a module that computes its weight gradients by itself: it is called after
    each backward of the stage and returns the function that the weight backward runs.

    `group` has the ranks of the pipeline; it may be a mesh with one dimension, such as mesh["pp"].

    `frees_after_backward` is for sharded modules that do not fit gathered: parameters that forwards
    free (`reshard_after_forward`) are then freed after every backward too, and gathered again.

    `get_mesh` is for DTensors that other stages send: it returns this rank's mesh, given the names
    of the sender's mesh dimensions and its layout. Without it, the mesh is found by the names, in
    the examples and then in the parameters.

    `tied` is for parameters that other stages hold too: it maps their names in the module to the
    names that all copies share.

    `skips_out` is for outputs that skip stages: it maps stages after the next one to the number of
    outputs that go there. These are the last outputs, those for the furthest stage at the end.
    `skips_in` is the other end: it maps stages before the previous one to the number of arguments
    that come from there. These are the first arguments, those from the first stage first.

    `recomputed` is for schedules that recompute forwards of this stage: it names the submodules
    that a recomputation runs again, such as "layers.0". The others keep what their backwards need.
    Without it, the whole stage is recomputed.

    `cut` describes the cut of the model that the stage is a piece of; it must be the same for all
    stages.

    Between steps, `submod` can be replaced, and its modules can be added, wrapped, converted or
    compiled: each step looks at them again.
    """

    settable = ("submod", "dw_builder", "frees_after_backward")

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
        group: GroupOrMesh = None,
        dw_builder: Callable[[], WeightBackward] | None = None,
        get_mesh: GetMesh | None = None,
        *,
        dynamic_shapes: bool = False,
        frees_after_backward: bool = False,
        tied: Mapping[str, str] | None = None,
        skips_in: Mapping[StageId, int] | None = None,
        skips_out: Mapping[StageId, int] | None = None,
        recomputed: Sequence[str] | None = None,
        cut: str = "",
    ) -> None:
        theirs = frozenset(self.__dict__)
        check_place(stage_index, num_stages)
        self._submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = as_group(group)
        self.group_rank, self.group_size = place_in(self.group)
        self.dw_builder = dw_builder
        self.dynamic_shapes = dynamic_shapes
        self.frees_after_backward = frees_after_backward
        self.tied = check_tied(stage_index, submodule, {} if tied is None else tied)
        self.skips_in = check_skip_counts("skips_in", stage_index, skips_in, range(stage_index - 1))
        later = range(stage_index + 2, num_stages)
        self.skips_out = check_skip_counts("skips_out", stage_index, skips_out, later)
        self.recomputed = as_part_names(stage_index, recomputed)
        self.cut = cut
        self._input_args = as_examples("input_args", input_args, input_grads)
        self._output_args = as_examples("output_args", output_args, output_grads)
        self.has_examples = self._input_args is not None or self._output_args is not None
        self._meshes = Meshes(get_mesh, [*(self._input_args or ()), *(self._output_args or ())])
        self._contexts = ForwardContexts(stage_index)
        self._engine: SplitEngine | None = None
        self._outline: list[tuple[Any, ...]] = []
        self._is_compiled = False
        self._is_urgent = True
        self._num_changes = 0
        self.refresh()
        self._seal(theirs)

    @property
    def input_args(self) -> tuple[Tensor, ...] | None:
        """The examples of one microbatch's inputs, if they were given."""
        return self._input_args

    @property
    def output_args(self) -> tuple[Tensor, ...] | None:
        """The examples of one microbatch's outputs, if they were given."""
        return self._output_args

    @property
    def submod(self) -> nn.Module:
        """The module, which may be replaced between steps."""
        return self._submod

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        check_tied(self.stage_index, module, self.tied)
        self._submod = module

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what was derived from this module: a copy derives it again."""
        return self.__dict__ | {"_engine": None, "_outline": []}

    def refresh(self) -> None:
        """Look at the module again: it may have changed since the last step."""
        self._meshes.forget()
        found = outline(self._submod)
        if found == self._outline:
            if self._engine is not None:
                self._engine.refresh()
            return
        find_parts(self.stage_index, self._submod, self.recomputed)
        self._engine = None
        self._is_compiled = any(map(is_compiled, self._submod.modules()))
        self._wrapping = Wrapping.of(self._submod, f"stage {self.stage_index}")
        self._is_sharded = bool(self._wrapping.sharding)
        self._outline = found
        self._num_changes += 1

    @property
    def num_changes(self) -> int:
        """How often the module was found changed: all that was derived from it must be again."""
        return self._num_changes

    def check_wrappers(self) -> None:
        """Raise an error if the module has a wrapper with which gradients would be wrong."""
        self._wrapping.check(self._place, ranks_of(self.group))

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
        """True if a part of the module is compiled, so that its operations cannot be watched."""
        return self._is_compiled

    @property
    def is_data_parallel(self) -> bool:
        """True if DistributedDataParallel reduces the gradients of the module."""
        return self._wrapping.ddp is not None

    @property
    def is_reduced(self) -> bool:
        """True if a wrapper averages the gradients of the module over replicas."""
        return self._wrapping.is_reduced

    @property
    def is_sharded(self) -> bool:
        """True if fully_shard or replicate was called on the module or a part of it."""
        return self._is_sharded

    @property
    def has_unreduced_grads(self) -> bool:
        """True if gradients of sharded parameters wait for a step that reduces them."""
        return self._wrapping.sharding.has_unreduced_grads

    @property
    def replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The ranks over which the stage's gradients are averaged, by dimension of their mesh."""
        return self._wrapping.replica_groups(self._place)

    @property
    def known_replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The same; empty where parameters have different meshes."""
        return self._wrapping.known_replica_groups

    @property
    def is_tensor_parallel(self) -> bool:
        """True if parameters are DTensors, so that ranks of other pipelines compute together."""
        return any(map(is_dtensor, self._submod.parameters()))

    @property
    def peer_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that take part in the stage's collectives; some may be in several groups."""
        ddp = self._wrapping.ddp
        return [*([] if ddp is None else [ddp.process_group]), *self.forward_groups]

    @property
    def forward_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that share parameters with the stage, so that its forwards need them too."""
        groups = self._wrapping.sharding.all_groups()
        for mesh in set(meshes_of(self._submod.parameters())):
            groups += mesh.get_all_groups()
        return groups

    @property
    def _place(self) -> str:
        return f"stage {self.stage_index} on rank {self.group_rank}"

    def tied_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield each tied parameter, after its name in this module and the name it shares."""
        module = unwrapped(self.submod)
        for param_name, name in self.tied.items():
            yield param_name, name, module.get_parameter(param_name)

    def share_out(self, mb: MicrobatchId, outputs: Any) -> list[tuple[Any, ...]]:
        """Return the outputs as arguments: for the next stage, then for each in `skips_out`."""
        arguments = as_arguments(outputs)
        if not self.skips_out:
            return [arguments]
        num_skipping = sum(self.skips_out.values())
        if len(arguments) < num_skipping:
            raise PipeliningShapeError(
                f"stage {self.stage_index}, microbatch {mb}: {len(arguments)} outputs, but "
                f"skips_out takes {num_skipping}. Let the module return a tuple that ends with "
                "them."
            )
        return shares_of(arguments, self.skips_out)

    def check_inputs(self, mb: MicrobatchId, args: tuple[Any, ...]) -> None:
        """Raise an error if the arguments do not match the `input_args` that were given."""
        if self._input_args is not None:
            check_like(self._input_args, args, f"stage {self.stage_index}, microbatch {mb}: input")

    def check_outputs(self, mb: MicrobatchId, outputs: Any) -> None:
        """Raise an error if the outputs do not match the `output_args` that were given."""
        if self._output_args is not None:
            place = f"stage {self.stage_index}, microbatch {mb}: output"
            check_like(self._output_args, outputs, place)

    def rebuild(
        self, part: Tensor, spread: Spread | None, mb: MicrobatchId, *, gradient_of: Any = None
    ) -> Tensor:
        """Return a tensor that has arrived: a DTensor on this rank's mesh if it was one.

        `gradient_of` is the output whose gradient it is, if it is a gradient.
        """
        if spread is None:
            return part
        if is_dtensor(gradient_of) and fits(gradient_of.device_mesh, spread):
            return spread.whole(part, gradient_of.device_mesh)
        what = "an input" if gradient_of is None else "an output gradient"
        place = f"{self._place}, microbatch {mb}: {what}"
        return spread.whole(part, self._meshes.find(spread, self._submod, place))

    def register_forward_context(self, context_factory: ContextFactory) -> RemovableHandle:
        """Run each forward of the module inside a context, until the handle is removed.

        `context_factory` is called with a PipelineStageInfo for each of them. Losses, backwards and
        blocks that a backward computes again are outside. There can be one at a time. A context
        that turns gradients off is refused in training if the stage has any to compute.
        """
        return self._contexts.register(context_factory)

    def evaluate(
        self,
        mb: MicrobatchId,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keeps_graph: bool = False,
    ) -> Any:
        """Run a forward without a backward; with `keeps_graph`, the caller may run one."""
        with torch.set_grad_enabled(keeps_graph):
            return self._contexts.run(mb, partial(self.submod, *args, **kwargs))

    def forward(
        self, mb: MicrobatchId, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_split: bool
    ) -> Passage:
        """Run a forward whose backward follows: in two halves if `is_split`."""
        if self._contexts or self._wrapping.ddp is not None:
            forward = partial(self._forward_unsynced, args, kwargs, is_split)
            return self._contexts.run(mb, forward, partial(self._needs_graph, args, kwargs))
        return self._forward(args, kwargs, is_split)

    def parts(self) -> dict[str, nn.Module]:
        """Return the submodules in `recomputed`, by name."""
        return find_parts(self.stage_index, self._submod, self.recomputed)

    def rerun_parts(self, mb: MicrobatchId, passage: Passage, run: Callable[[], None]) -> None:
        """Run parts of a passage's forward again, in the way in which the forward ran."""
        sharding = self._wrapping.sharding
        with sharding.gathered() if sharding else nullcontext(), passage.rerunning():
            self._contexts.run(mb, run)

    def _needs_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a backward would give gradients to inputs or parameters."""
        return any(map(needs_grad, chain(_inputs_of(args, kwargs), self._submod.parameters())))

    def _forward_unsynced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_split: bool
    ) -> Passage:
        if (ddp := self._wrapping.ddp) is None:
            return self._forward(args, kwargs, is_split)
        with ddp.no_sync():
            return self._forward(args, kwargs, is_split)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_split: bool) -> Passage:
        if is_split and self.dw_builder is None:
            return self._forward_split(args, kwargs)
        outputs = self._submod(*args, **kwargs)
        builder = None if self.dw_builder is None else self._built_weight_backward
        return WholePassage(outputs, _inputs_of(args, kwargs), builder)

    def _forward_split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passage:
        sharding = self._wrapping.sharding
        if not sharding:  # Otherwise the engine knows when its parameters are gathered.
            inputs = _inputs_of(args, kwargs)
            if not any(map(needs_grad, inputs)):
                return LatePassage(self._submod(*args, **kwargs), inputs)
        is_new = self._engine is None
        if self._engine is None:
            self._engine = SplitEngine(self._submod, sharding or None)
        pending = self._engine.forward(*args, **kwargs)
        is_urgent = any(map(needs_grad, pending.inputs))
        if is_urgent is not self._is_urgent:
            self._is_urgent = is_urgent
        if is_new and self._is_compiled and self._is_urgent:
            warn_of_compiled_weights(self._place, self._submod, pending)
        return SplitPassage(pending, is_last=self.is_last)

    def expect_last_grads(self) -> None:
        """Let a data-parallel wrapper reduce gradients in the backward that comes next."""
        self._wrapping.expect_last_grads()

    def reduce_late_grads(self) -> None:
        """Let a data-parallel wrapper reduce what the last backward did not reach."""
        self._wrapping.reduce_late_grads(self._place)

    def shares_sharded_module(self, other: "PipelineStage") -> bool:
        """Return whether a sharded module is in both stages."""
        return self._wrapping.sharding.shares_with(other._wrapping.sharding)

    def _built_weight_backward(self) -> WeightBackward:
        """Return what `dw_builder` returns, run on gathered parameters."""
        assert self.dw_builder is not None  # Otherwise nobody calls this.
        run, sharding = self.dw_builder(), self._wrapping.sharding

        def run_gathered() -> None:
            with sharding.gathered():
                run()

        return run_gathered if sharding else run

    def begin_step(self, *, is_scheduled: bool) -> None:
        """Let the gradients of sharded parameters add up until `start_reduction`.

        If `is_scheduled`, the schedule says when parameters are gathered and freed.
        """
        self._wrapping.sharding.begin(
            is_scheduled=is_scheduled, frees_after_backward=self.frees_after_backward
        )

    def unshard(self) -> None:
        """Start to gather sharded parameters."""
        self._wrapping.sharding.unshard()

    def reshard(self, *, has_weight_backwards: bool = False) -> None:
        """Free gathered parameters, unless weight backwards that follow need their values."""
        engine = self._engine
        needs_values = engine is not None and (engine.needs_parameters or not self._is_urgent)
        if not (has_weight_backwards and needs_values):
            self._wrapping.sharding.reshard()

    def accumulate_grads(self) -> None:
        """Add up what a microbatch has added to sharded parameters."""
        if self._is_sharded:
            self._wrapping.sharding.accumulate()

    def start_reduction(self, *, is_final: bool) -> None:
        """Start to reduce the gradients of sharded parameters, once for the whole step.

        Unless `is_final`, keep them for a later step that reduces them.
        """
        self._wrapping.sharding.reduce(is_final=is_final)

    def endings(self) -> list[Future[float]]:
        """Return when the gathers or reductions that were just started end, once they have."""
        return self._wrapping.sharding.endings()

    def finish_reduction(self) -> None:
        """Wait for reductions: sharded parameters then have their gradients."""
        self._wrapping.sharding.finish()

    def end_step(self) -> None:
        """Leave sharded parameters with their gradients, and free."""
        self._wrapping.sharding.finish()
        self._wrapping.sharding.reshard()

    def drop_unreduced_grads(self) -> None:
        """Drop gradients of sharded parameters that wait for a step that reduces them."""
        self._wrapping.sharding.drop_grads()

    def abandon_step(self) -> None:
        """Shard parameters again, and drop their gradients, after a step that failed."""
        self._wrapping.sharding.abandon()


def _inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments; nearly always, all of them are plain tensors."""
    if not kwargs and _PLAIN.issuperset(map(type, args)):
        return list(args)
    return tensors_in((args, kwargs))
