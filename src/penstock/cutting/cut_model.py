"""A model that was cut into stages."""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.cutting.model_names import install
from penstock.errors import StageError
from penstock.ir import StageId
from penstock.stage import GroupOrMesh, PipelineStage
from penstock.stage.outputs import as_arguments, shares_of
from penstock.torch_private import pytree, wrap_with_autocast


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A description of one stage of a cut model."""

    starts_at: str
    """The place in the model where it begins; empty for the first stage."""
    num_parameters: int
    tied: tuple[str, ...]
    """The parameters that other stages hold too."""
    receives: tuple[str, ...]
    """Descriptions of the values it receives from earlier stages; empty if it was not traced."""
    ties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The names that tied parameters share with other stages, by their names here."""
    skips_in: Mapping[StageId, int] = field(default_factory=dict, repr=False)
    """The number of values from each earlier stage but the previous one."""
    skips_out: Mapping[StageId, int] = field(default_factory=dict, repr=False)
    """The number of values for each later stage but the next one."""


@dataclass(frozen=True, slots=True)
class CutInfo:
    """A description of a cut model; `print(pipe.info())` shows it stage by stage."""

    stages: tuple[StageInfo, ...]
    cut: str = ""
    """The places where the stages begin, as `CutModel.cut` has them."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def __str__(self) -> str:
        lines = []
        for index, stage in enumerate(self.stages):
            start = f", from {stage.starts_at}" if stage.starts_at else ""
            lines.append(f"stage {index}{start}: {stage.num_parameters:,} parameters")
            if stage.receives:
                lines.append(f"  receives {', '.join(stage.receives)}")
            if stage.tied:
                lines.append(f"  tied: {', '.join(stage.tied)}")
        return "\n".join(lines)


class CutModel:
    """A model cut into stages, made by `penstock.cut`, `cut_between_modules` or `cut_any`.

    Its stages hold the model's own parameters and buffers under the model's own names. A
    parameter that several stages use is tied: the first of them holds the model's own, the others
    hold copies, and a step sums their gradients. Calling it runs its stages one after the other.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tied: Sequence[dict[str, str]],
        starts: Sequence[str],
        given: Mapping[tuple[StageId, StageId], Sequence[str]] | None = None,
    ) -> None:
        """Store the stages; `given` describes the values they give each other, if known."""
        self.modules = modules
        """The modules of the stages."""
        self.repeats_inputs = False
        """Whether every stage takes the model's inputs too, all of them as keyword arguments."""
        self._tied = tuple(tied)
        self._starts = ("", *starts)
        self._given = dict(sorted((given or {}).items()))
        self._names = [_names_of_one(module) for module in modules]
        self._unsaved = [_unsaved_without_values(module) for module in modules]

    @property
    def num_stages(self) -> int:
        return len(self.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.repeats_inputs:
            args, kwargs = (), as_keywords(self.modules[0], args, kwargs)
        return self.run_stages(lambda _, module, values: module(*values, **kwargs), args)

    def run_stages(
        self, run: Callable[[StageId, nn.Module, tuple[Any, ...]], Any], args: tuple[Any, ...]
    ) -> Any:
        """Call `run(stage, module, arguments)` for each stage in turn; return the last outputs."""
        arguments: dict[StageId, tuple[Any, ...]] = {0: args}
        outputs: Any = None
        for stage, module in enumerate(self.modules):
            outputs = run(stage, module, arguments.pop(stage, ()))
            skips_out = self._skips_out(stage)
            shares = shares_of(as_arguments(outputs), skips_out)
            for target, share in zip((stage + 1, *skips_out), shares, strict=True):
                arguments[target] = arguments.get(target, ()) + share
        return outputs

    def _skips_out(self, stage: StageId) -> dict[StageId, int]:
        """Return the number of values that a stage gives to each later stage but the next."""
        return {
            target: len(values)
            for (source, target), values in self._given.items()
            if source == stage and target > stage + 1
        }

    def _skips_in(self, stage: StageId) -> dict[StageId, int]:
        return {
            source: len(values)
            for (source, target), values in self._given.items()
            if target == stage and source < stage - 1
        }

    def __repr__(self) -> str:
        return f"CutModel({self.num_stages} stages)"

    def get_stage_module(self, stage_index: StageId) -> nn.Module:
        """Return the module of one stage."""
        if not isinstance(stage_index, int) or not 0 <= stage_index < self.num_stages:
            raise StageError(
                f"stage_index is {stage_index!r}. "
                f"Expected a whole number from 0 to {self.num_stages - 1}."
            )
        return self.modules[stage_index]

    def build_stage(
        self,
        stage_index: StageId,
        device: torch.device | str,
        group: GroupOrMesh = None,
        *,
        dynamic_shapes: bool = False,
        recomputed: Sequence[str] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        kind: type[PipelineStage] = PipelineStage,
    ) -> PipelineStage:
        """Return the stage for a pipeline, with its module moved to the device.

        The stage does not hold the other ones: drop the cut model and the model to free them. For
        a model that was cut on the meta device, `buffers` has the values of this stage's buffers
        that are not in a state dict. `recomputed` names the parts of the stage that recomputations
        run again; a stage that was traced has none. `kind` is the class of the stage.
        """
        module = self.get_stage_module(stage_index)
        self._set_buffers(stage_index, module, buffers or {})
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            raise StageError(
                f"stage {stage_index} has parameters or buffers on the meta device, which have no "
                "values. Call pipe.get_stage_module(…).to_empty(device=…) and load its state dict "
                "first; a stage uses the same names as the model."
            )
        _join_names(stage_index, module, self._names[stage_index])
        return stage_of(
            module,
            stage_index,
            self.info(),
            device,
            group,
            dynamic_shapes=dynamic_shapes,
            recomputed=recomputed,
            kind=kind,
        )

    def _set_buffers(
        self, stage_index: StageId, module: nn.Module, buffers: Mapping[str, Tensor]
    ) -> None:
        for name in self._unsaved[stage_index]:
            if name not in buffers:
                raise StageError(
                    f"stage {stage_index} has the buffer {name!r}, which was on the meta device "
                    "and is not persistent, so neither the model nor a state dict has its "
                    "values. Give them: build_stage(…, buffers={name: tensor})."
                )
            install(module, name, buffers[name], is_persistent=False)

    @property
    def cut(self) -> str:
        """The places where the stages begin; they must be the same on all ranks of a pipeline."""
        return f"{self.num_stages} stages, from {', '.join(self._starts[1:]) or 'one piece'}"

    def info(self) -> CutInfo:
        """Return a description of the stages, to print."""
        stages = []
        for index, module in enumerate(self.modules):
            received = [
                value if source == index - 1 else f"{value} from stage {source}"
                for (source, target), values in self._given.items()
                if target == index
                for value in values
            ]
            stages.append(
                StageInfo(
                    starts_at=self._starts[index],
                    num_parameters=sum(p.numel() for p in module.parameters()),
                    tied=tuple(self._tied[index]),
                    receives=tuple(received),
                    ties=self._tied[index],
                    skips_in=self._skips_in(index),
                    skips_out=self._skips_out(index),
                )
            )
        return CutInfo(tuple(stages), self.cut)

    def print_readable(self) -> None:
        """Print each stage: its code if it was traced, otherwise its modules."""
        for index, module in enumerate(self.modules):
            print(f"# stage {index} of {self.num_stages}")
            if isinstance(module, fx.GraphModule):
                module.print_readable()
            else:
                print(module)


def as_keywords(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model by keyword."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    try:
        names = list(signature.bind(*args, **kwargs).arguments)[: len(args)]
    except TypeError as exc:
        raise StageError(
            f"the arguments do not fit the forward of {type(model).__name__}: {exc}."
        ) from exc
    kinds = [signature.parameters[name].kind for name in names]
    if any(kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds):
        raise StageError(
            f"the forward of {type(model).__name__} takes arguments that have no names, and each "
            "stage takes the model's inputs by keyword. Name them."
        )
    return {**dict(zip(names, args, strict=True)), **kwargs}


def stage_of(
    module: nn.Module,
    stage_index: StageId,
    info: CutInfo,
    device: torch.device | str,
    group: GroupOrMesh = None,
    *,
    dynamic_shapes: bool = False,
    recomputed: Sequence[str] | None = None,
    kind: type[PipelineStage] = PipelineStage,
) -> PipelineStage:
    """Return a stage made of one module of a cut model, which is moved to the device."""
    if isinstance(module, fx.GraphModule):
        _check_constants(stage_index, module)
        _move_operations(module, torch.device(device))
    own = info.stages[stage_index]
    where = torch.device(device)
    if any(tensor.device != where for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)
    return kind(
        module,
        stage_index,
        info.num_stages,
        device,
        group=group,
        dynamic_shapes=dynamic_shapes,
        tied=own.ties,
        skips_in=own.skips_in,
        skips_out=own.skips_out,
        recomputed=recomputed,
        cut=info.cut,
    )


def _names_of_one(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _join_names(stage: StageId, module: nn.Module, groups: list[list[str]]) -> None:
    """Give the names of one parameter one parameter again: to_empty() makes one for each name."""
    known = dict(module.named_parameters(remove_duplicate=False))
    for first, *others in groups:
        if missing := [name for name in (first, *others) if name not in known]:
            raise StageError(
                f"stage {stage} has no parameter {missing[0]!r}, which its layers share. Expected "
                "the module of the cut: wrap its layers, or what build_stage() returns, instead."
            )
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


def _check_constants(stage_index: StageId, module: fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, Tensor) and value.is_meta:
            raise StageError(
                f"stage {stage_index} uses a tensor that the model's forward made on the meta "
                f"device ({node.target}), so its values are lost. Make it a buffer of the "
                "model, or trace a model that is not on the meta device."
            )


def _unsaved_without_values(module: nn.Module) -> list[str]:
    """Return the names of buffers on the meta device that are not in the state dict."""
    saved = module.state_dict(keep_vars=True)
    return [name for name, b in module.named_buffers() if b.is_meta and name not in saved]


def _move_operations(module: fx.GraphModule, device: torch.device) -> None:
    """Let operations make new tensors on `device`, not on the device of the trace."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for graph_module in module.modules():
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            node.args = pytree.tree_map(moved, node.args)
            node.kwargs = pytree.tree_map(moved, node.kwargs)
            if node.target is wrap_with_autocast:
                node.update_arg(0, device.type)
        graph_module.recompile()
