"""A model's forward as a graph, by torch.export."""

import linecache
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.cutting.marks import SplitPoint, marked, remove_calls
from penstock.cutting.own_backwards import noticing_checkpoints, refusing_own_backwards
from penstock.errors import PipelineError, StageError, TraceError
from penstock.stage.examples import check_tensor
from penstock.torch_private import assert_tensor_metadata, pytree

TakeInputs: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]
GiveOutputs: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced model. Its parameters are the model's own."""

    model: nn.Module
    graph_module: fx.GraphModule
    take_inputs: TakeInputs
    """The function from a call's arguments to the values of the graph's placeholders."""
    give_outputs: GiveOutputs
    """The function from the graph's results to the outputs of the model."""


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
    return Trace(
        model,
        graph_module,
        _make_take_inputs(names, *program.example_inputs),
        _make_give_outputs(program.call_spec.out_spec),
    )


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> tuple[ExportedProgram, fx.GraphModule]:
    try:
        with marked(model, split_spec), refusing_own_backwards(model):
            program = torch.export.export(model, args, kwargs, strict=False)
        return program, program.module(check_guards=False)
    except PipelineError:
        raise
    except Exception as exc:
        raise _untraceable(model, exc) from exc


def _make_take_inputs(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TakeInputs:
    examples, structure = pytree.tree_flatten((args, kwargs))
    forms = [x.to("meta") if isinstance(x, Tensor) else x for x in examples]
    keys, num_args = list(kwargs), len(args)

    def take_inputs(args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
        if len(args) != num_args or set(given) != set(keys):
            raise StageError(
                f"the model was traced with {_call(num_args, keys)}, but called with "
                f"{_call(len(args), given)}. Call it with arguments like those that it was traced "
                "with, on the rank of its first stage."
            )
        try:
            leaves = structure.flatten_up_to((args, {key: given[key] for key in keys}))
        except ValueError as exc:
            raise StageError(
                f"the arguments of the model are not nested like those that it was traced with: "
                f"{exc}. Expected {structure}."
            ) from exc
        for name, expected, leaf in zip(names, forms, leaves, strict=True):
            _check_input(name, expected, leaf)
        return leaves

    return take_inputs


def _call(num_args: int, keys: Iterable[str]) -> str:
    """Describe the arguments of a call."""
    return ", ".join([f"{num_args} positional arguments", *(f"{key}=" for key in keys)])


def _check_input(name: str, expected: Any, leaf: Any) -> None:
    if isinstance(expected, Tensor) and isinstance(leaf, Tensor):
        remedy = "Trace the model with an example of one microbatch as it comes in a step."
        check_tensor(f"input {name}", expected, leaf, remedy)
    elif isinstance(expected, Tensor) or isinstance(leaf, Tensor) or expected != leaf:
        raise StageError(
            f"input {name} is {_brief(leaf)}, but the model was traced with {_brief(expected)}, "
            "on which its graph may depend. Give it the same, or trace the model again."
        )


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


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
