"""A traced model as torch's Pipe: a module whose children are the stages."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from penstock.compat._utils import PipeInfo
from penstock.compat.joined import JoinedStages, StageRunner, child_name, join
from penstock.compat.same_graph import describe_graph, gives_same_graph, in_modes
from penstock.compat.stage import PipelineStage
from penstock.cutting import CutModel
from penstock.cutting.assembling import assemble_along
from penstock.cutting.flow import find_flow
from penstock.cutting.marks import SplitPoint
from penstock.cutting.traced_cut import trace_marked
from penstock.cutting.tracing import Trace
from penstock.errors import StageError, TraceError
from penstock.ir import StageId
from penstock.stage import GroupOrMesh
from penstock.stage import PipelineStage as _PipelineStageBase


class Pipe(nn.Module):
    """A traced model, cut into stages; `pipeline` makes it.

    The stages are the children of `split_gm`, and keep the model's names below `submod_pp_0` and
    so on. Calling a pipe runs all stages in this process, and returns the model's outputs as a
    flat tuple. Stages of a pipeline return tensors too, or tuples of tensors, as torch's do.
    """

    def __init__(self, split_gm: JoinedStages, cut: CutModel, trace: Trace) -> None:
        super().__init__()
        self.split_gm = split_gm
        self._cut = cut
        self._cut.modules = _Children(split_gm, cut.num_stages)
        self._inputs = trace.inputs
        self._model = [trace.model]  # In a list, so that it is not a child.
        self._described = describe_graph(trace.graph_module)
        self._modes = {name: module.training for name, module in trace.model.named_modules()}
        # The dtypes of parameters and the forms of arguments for which the graph holds.
        self._proved = [(self._dtypes_now(), self._inputs.traced_forms)]
        self.num_stages = cut.num_stages
        self.has_loss_and_backward = False
        self.loss_spec = None
        self.replicated_params = _replicated(cut)
        self.train(trace.model.training)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> "Pipe":
        """Trace a model and cut it where it calls `pipe_split()`, or where a policy says."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run all stages, one after the other; return the model's outputs as a flat tuple.

        Arguments may be given by position or by keyword. Shapes other than those of the trace
        are taken if the model has the same graph for them, which another trace finds out once.
        """
        args, kwargs = self._inputs.in_order(args, kwargs)
        leaves = self._inputs.flatten(args, kwargs)
        self._check_graph(args, kwargs, leaves)
        results: tuple[Any, ...] = StageRunner(self.split_gm, args, kwargs).run(*leaves)
        return results

    def _check_graph(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> None:
        """Raise an error if the graph may not hold for these arguments, or for the parameters."""
        dtypes = self._dtypes_now()
        for proved_dtypes, forms in self._proved:
            if proved_dtypes == dtypes and not self._inputs.difference(forms, leaves):
                return
        reason: Exception | None = None
        try:
            with in_modes(self._model[0], self._modes):
                is_same = gives_same_graph(self._model[0], args, kwargs, self._described)
        except TraceError as exc:
            is_same, reason = False, exc
        if not is_same:
            difference = self._inputs.difference(self._inputs.traced_forms, leaves)
            raise StageError(
                f"{difference or 'the parameters have other dtypes now'}, and "
                "the model does something else for that (its graph has sizes, dtypes or values in "
                "it). Call the pipe as it was traced, or trace the model again with pipeline()."
            ) from reason
        self._proved.append((dtypes, self._inputs.add_forms(leaves)))

    def _dtypes_now(self) -> list[torch.dtype]:
        return [tensor.dtype for tensor in (*self.parameters(), *self.buffers())]

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of one stage."""
        return self._cut.get_stage_module(stage_idx)

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        group: GroupOrMesh = None,
        *,
        dynamic_shapes: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> _PipelineStageBase:
        """Return the stage for a schedule, as `penstock.CutModel.build_stage` does."""
        return self._cut.build_stage(
            stage_index,
            device,
            group,
            dynamic_shapes=dynamic_shapes,
            buffers=buffers,
            kind=PipelineStage,
        )

    def info(self) -> PipeInfo:
        """Return a description of the stages, to print or to make stages from."""
        own = self._cut.info()
        return PipeInfo(own.stages, own.cut, self.split_gm.graph)

    def print_readable(self) -> None:
        """Print the code of the joined stages and of each stage."""
        self.split_gm.print_readable()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipe":
        """Return a pipe with stages of its own, and a model that shares their parameters."""
        own = Pipe.__new__(Pipe)
        memo[id(self)] = own
        memo[id(self._inputs)] = self._inputs  # The graph of the first stage has the same.
        for key, value in vars(self).items():
            vars(own)[key] = copy.deepcopy(value, memo)
        return own

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TraceError(
            "a Pipe cannot be pickled, as its graph calls functions that are made by the trace. "
            "Save its state_dict(), and cut the model again where it is loaded."
        )


class _Children(Sequence[nn.Module]):
    """The stages of a pipe as they are now: clients may replace the children of `split_gm`."""

    def __init__(self, split_gm: nn.Module, num_stages: int) -> None:
        self._split_gm, self._num_stages = split_gm, num_stages

    def __len__(self) -> int:
        return self._num_stages

    def __getitem__(self, stage: Any) -> Any:
        if not 0 <= stage < self._num_stages:
            raise IndexError(stage)
        return self._split_gm.get_submodule(child_name(stage))

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[stage] for stage in range(self._num_stages))


def _replicated(cut: CutModel) -> list[dict[str, str]]:
    """Return the name of each tied parameter in each of its stages."""
    found: dict[str, dict[str, str]] = {}
    for stage, info in enumerate(cut.info().stages):
        for own, shared in info.ties.items():
            found.setdefault(shared, {})[child_name(StageId(stage))] = own
    return list(found.values())


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and cut it into stages, as `penstock.cut` does, but into those of a `Pipe`.

    The stages give what torch's do: tensors or tuples of tensors, without the model's own classes
    of outputs. The last stage returns only the values that it computes.
    """
    trace = trace_marked(module, mb_args, mb_kwargs, split_spec, split_policy)
    flow = find_flow(trace.graph_module)
    cut = assemble_along(flow, trace, is_flat=True)
    return Pipe(join(list(cut.modules), flow, trace), cut, trace)
