"""Wrap the stages of a rank for the other dimensions of its mesh."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock.cutting.chain import ChainStage, modules_called_by
from penstock.errors import StageError
from penstock.parallel.mesh_dims import MeshDims
from penstock.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class Spreading:
    """The spread of stages over ranks: by DDP, fully_shard and tensor parallelism."""

    dims: MeshDims
    tp_plan: Mapping[str, ParallelStyle] = field(default_factory=dict)
    fsdp_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, module_names: Collection[str], *, repeats_inputs: bool) -> None:
        """Raise an error for arguments that would be ignored, or that the cut does not allow."""
        if self.fsdp_options and self.dims.shards is None:
            raise StageError(
                "fsdp_options were given, but nothing is sharded. Give a mesh with a dimension "
                "that is named 'fsdp', or leave them out."
            )
        policy = self.fsdp_options.get("mp_policy")
        if repeats_inputs and policy is not None and policy.param_dtype is not None:
            raise StageError(
                f"fsdp_options have an mp_policy with param_dtype={policy.param_dtype}, but the "
                "model could not be traced: each stage computes masks and the like again, in the "
                "dtype of the example. Leave param_dtype out, and use torch.autocast around step()."
            )
        if bool(self.tp_plan) != (self.dims.tensor is not None):
            raise StageError(
                "tensor parallelism needs both a mesh with a dimension that is named 'tp' and a "
                "tp_plan, such as {'layers.*.up': ColwiseParallel()}. Give both, or neither."
            )
        for pattern in self.tp_plan:
            if not any(_matches(pattern, name) for name in module_names):
                raise StageError(
                    f"tp_plan names {pattern!r}, and no module of the model has such a name. "
                    "Expected names as in named_modules(), with * for any part between dots."
                )

    def apply(self, stage: PipelineStage) -> None:
        """Wrap the module of a stage; its parameters may be replaced."""
        if self.dims.tensor is not None:
            self._make_tensor_parallel(stage)
        if self.dims.shards is not None:
            options = {"reshard_after_forward": False, **self.fsdp_options}
            for layer in _layers_of(stage.submod):
                fully_shard(layer, mesh=self.dims.shards, **options)
            fully_shard(stage.submod, mesh=self.dims.shards, **options)
        elif self.dims.replicas is not None and _is_trained(stage.submod):
            ids = None if stage.device.type == "cpu" else [stage.device]
            group = self.dims.replicas.get_group()
            stage.submod = DistributedDataParallel(stage.submod, ids, process_group=group)

    def _make_tensor_parallel(self, stage: PipelineStage) -> None:
        if isinstance(stage.submod, fx.GraphModule):
            raise StageError(
                f"stage {stage.stage_index} was traced, and a trace has the shapes of whole "
                "layers, so it cannot be tensor parallel. Give a cut between modules: "
                "cut=penstock.cut_between_modules(model, …)."
            )
        plan = {
            name: style
            for pattern, style in self.tp_plan.items()
            for name, module in stage.submod.named_modules()
            if _matches(pattern, name) and any(True for _ in module.parameters())
        }
        if plan:
            parallelize_module(stage.submod, self.dims.tensor, plan)


def _matches(pattern: str, name: str) -> bool:
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a stage that are called as modules and have parameters of their own."""
    if isinstance(module, ChainStage):
        yield from (layer for layer in modules_called_by(module) if _is_trained(layer))


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def names_of_modules(modules: Sequence[nn.Module]) -> set[str]:
    """Return the names of all modules in some stages."""
    return {name for module in modules for name, _ in module.named_modules()}
