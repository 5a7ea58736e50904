"""A model's forward as a graph, by torch.export."""

import linecache
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.cutting.inputs import Inputs
from penstock.cutting.marks import SplitPoint, marked, remove_calls
from penstock.cutting.own_backwards import noticing_checkpoints, refusing_own_backwards
from penstock.cutting.settled_branches import SettledBranches
from penstock.cutting.unread_tensors import UnreadTensors
from penstock.errors import PipelineError, StageError, TraceError
from penstock.ir import StageId
from penstock.torch_private import assert_tensor_metadata, pytree

TakeInputs: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]
TakeValues: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]
GiveOutputs: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced model. Its parameters are the model's own."""

    model: nn.Module
    graph_module: fx.GraphModule
    inputs: Inputs
    """The arguments that it was traced with."""
    take_inputs: TakeInputs
    """The function from a call's arguments to the values of the graph's placeholders."""
    give_outputs: GiveOutputs
    """The function from the graph's results to the outputs of the model."""

    @property
    def results(self) -> list[Any]:
        """The results of the graph: nodes, or values other than tensors."""
        (output,) = self.graph_module.graph.find_nodes(op="output")
        return list(output.args[0])


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> Trace:
    """Trace a model on one microbatch; this computes only shapes, no values."""
    if not isinstance(model, nn.Module):
        raise StageError(f"module is a {type(model).__name__}. Expected a torch.nn.Module.")
    if not isinstance(args, tuple):
        raise StageError(
            f"mb_args is a {type(args).__name__}. Expected a tuple of positional arguments, "
            "those of one microbatch: (x,) for one."
        )
    with noticing_checkpoints(model):
        program, graph_module = _export(model, args, kwargs, split_spec)
    # Under autocast, dtypes may differ from those in the trace.
    remove_calls(graph_module, assert_tensor_metadata)
    assert program.example_inputs is not None
    names = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    inputs = Inputs(model, names, *program.example_inputs)
    return Trace(
        model,
        graph_module,
        inputs,
        _make_take_inputs(inputs),
        _make_give_outputs(program.call_spec.out_spec),
    )


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> tuple[ExportedProgram, fx.GraphModule]:
    try:
        with (
            UnreadTensors(model, args, kwargs) as unread,
            marked(model, split_spec),
            refusing_own_backwards(model),
            SettledBranches(),
        ):
            program = torch.export.export(model, args, kwargs, strict=False)
        graph_module = program.module(check_guards=False)
        unread.put_back(graph_module)
        return program, graph_module
    except PipelineError:
        raise
    except Exception as exc:
        raise _untraceable(model, exc) from exc


def _make_take_inputs(inputs: Inputs) -> TakeInputs:
    """Return a function: the code of a graph can call one by its name, but not a method."""

    def take_inputs(args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
        return inputs.take(args, given)

    return take_inputs


def make_take_values(inputs: Inputs, stage: StageId) -> TakeValues:
    """Return a function for a later stage that takes only what earlier stages give it.

    A rank gives keyword arguments of the first stage to all its stages, so those are allowed.
    """

    def take_values(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, ...]:
        if given:
            inputs.check_keywords(stage, given)
        return args

    return take_values


def _make_give_outputs(structure: pytree.TreeSpec) -> GiveOutputs:
    def give_outputs(values: list[Any]) -> Any:
        return pytree.tree_unflatten(values, structure)

    return give_outputs


def _untraceable(model: nn.Module, exc: Exception) -> TraceError:
    """Return the error for a model that cannot be traced, with the line of the model, if known."""
    frames = [
        frame
        for frame in traceback.extract_tb(exc.__traceback__)
        if not _is_inside(frame.filename) and not frame.filename.startswith("<")
    ]
    where = ""
    if frames:
        last = frames[-1]
        code = linecache.getline(last.filename, last.lineno or 0).strip()
        where = f"\n  {last.filename}:{last.lineno}, in {last.name}: {code}"
    reason = str(exc).strip().splitlines()
    return TraceError(
        f"{type(model).__name__} cannot be traced: {type(exc).__name__}: "
        f"{reason[0] if reason else 'no reason given'}{where}\n"
        "A model can be traced if its forward does the same whatever the values of its tensors "
        "are, and returns tensors in tuples, lists, dicts or dataclasses that torch knows (not a "
        "cache: use_cache=False in transformers). Change that (torch.where and torch.cond choose "
        "by value), or cut the model between its modules with penstock.cut_between_modules(): "
        "docs/cutting.md shows how, also for a model that is not a chain of modules."
    )


def _is_inside(filename: str) -> bool:
    """Return whether a file belongs to torch or Penstock, not to the model."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    return filename.startswith(tuple(folder + os.sep for folder in inside))
