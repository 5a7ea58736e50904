"""A piece of the model, at its place in the pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.backward import SplitEngine
from penstock.backward.structure import tensors_in
from penstock.backward.wrappers import is_compiled, outline
from penstock.errors import PipeliningShapeError
from penstock.ir import MicrobatchId, StageId
from penstock.sealed import Sealed
from penstock.stage.examples import Examples, as_examples, check_like
from penstock.stage.outputs import as_arguments, shares_of
from penstock.stage.passage import Passage, SplitPassage, WeightBackward, WholePassage
from penstock.stage.stage_checks import (
    Group,
    check_place,
    check_skip_counts,
    check_tied,
    place_in,
    unwrapped,
)
from penstock.stage.wrapping import Wrapping
from penstock.torch_private import prepare_reducer


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
        check_place(stage_index, num_stages)
        self._submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.group = group
        self.group_rank, self.group_size = place_in(group)
        self.dw_builder = dw_builder
        self.dynamic_shapes = dynamic_shapes
        self.tied = check_tied(stage_index, submodule, {} if tied is None else tied)
        self.skips_in = check_skip_counts("skips_in", stage_index, skips_in, range(stage_index - 1))
        later = range(stage_index + 2, num_stages)
        self.skips_out = check_skip_counts("skips_out", stage_index, skips_out, later)
        self.cut = cut
        self._input_args = as_examples("input_args", input_args, input_grads)
        self._output_args = as_examples("output_args", output_args, output_grads)
        self._engine: SplitEngine | None = None
        self._outline: list[tuple[Any, ...]] = []
        self._is_compiled = False
        self._wrapping = Wrapping(None, None)
        self.refresh()
        self._seal(theirs)

    @property
    def submod(self) -> nn.Module:
        """The module, which may be replaced between steps."""
        return self._submod

    @submod.setter
    def submod(self, module: nn.Module) -> None:
        check_tied(self.stage_index, module, self.tied)
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
        self._wrapping = Wrapping.of(self._submod, f"stage {self.stage_index}")
        self._outline = found

    def check_wrappers(self, *, is_split: bool) -> None:
        """Raises if gradients would come out wrong; `is_split`: in a backward of two halves."""
        self._wrapping.check(self._place, is_split=is_split)

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
    def is_data_parallel(self) -> bool:
        """Whether DistributedDataParallel reduces the gradients of the module."""
        return self._wrapping.ddp is not None

    @property
    def is_reduced(self) -> bool:
        """Whether a wrapper averages the gradients of the module over replicas."""
        return self._wrapping.is_reduced

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the stage's gradients are averaged, if they are."""
        return self._wrapping.replica_group(self._submod, self._place)

    @property
    def _place(self) -> str:
        return f"stage {self.stage_index} on rank {self.group_rank}"

    def tied_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Parameters that other stages hold too: each with its name here, and the shared one."""
        module = unwrapped(self.submod)
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
            check_like(self._input_args, args, f"stage {self.stage_index}, microbatch {mb}: input")

    def check_outputs(self, mb: MicrobatchId, outputs: Any) -> None:
        """Raises if the outputs are not like the `output_args` that were given."""
        if self._output_args is not None:
            place = f"stage {self.stage_index}, microbatch {mb}: output"
            check_like(self._output_args, outputs, place)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward without a backward."""
        with torch.no_grad():
            return self.submod(*args, **kwargs)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_split: bool) -> Passage:
        """A forward whose backward follows: in two halves if `is_split`."""
        ddp = self._wrapping.ddp
        with nullcontext() if ddp is None else ddp.no_sync():
            if not is_split or self.dw_builder is not None:
                outputs = self.submod(*args, **kwargs)
                return WholePassage(outputs, tensors_in((args, kwargs)), self.dw_builder)
            if self._engine is None:
                self._engine = SplitEngine(self.submod)
            return SplitPassage(self._engine.forward(*args, **kwargs), is_last=self.is_last)

    def expect_last_grads(self) -> None:
        """Let a data-parallel wrapper reduce gradients in the backward that comes next."""
        if self._wrapping.ddp is not None:
            prepare_reducer(self._wrapping.ddp)


def build_stage(
    stage_module: nn.Module,
    stage_index: StageId,
    num_stages: int,
    device: torch.device | str,
    group: Group = None,
) -> PipelineStage:
    """A stage of a module that was cut out of a model."""
    return PipelineStage(stage_module.to(device), stage_index, num_stages, device, group=group)
