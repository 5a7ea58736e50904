"""What is wrapped around the module of a stage, and reduces or shards its gradients."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.backward.wrappers import Wrapper, find_wrapper
from penstock.errors import StageError


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The wrappers of a stage's module; `place` names the stage in error messages."""

    ddp: DistributedDataParallel | None
    """Around the whole module: it works with every schedule."""
    found: tuple[str, Wrapper] | None
    """The worst of all others, and the name of the module that has it."""

    @classmethod
    def of(cls, module: nn.Module, place: str) -> "Wrapping":
        """Find the wrappers; raises for options that no schedule works with."""
        ddp = module if isinstance(module, DistributedDataParallel) else None
        for option in ("find_unused_parameters", "static_graph"):
            if ddp is not None and getattr(ddp, option):
                raise StageError(
                    f"{place} is wrapped in DistributedDataParallel with "
                    f"{option}=True, which looks for parameters in a graph that a pipeline does "
                    "not give it. Leave that out, and let every parameter be used."
                )
        return cls(ddp, find_wrapper(module))

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are averaged over replicas."""
        return self.ddp is not None or self.found is not None

    def check(self, place: str, *, is_split: bool) -> None:
        """Raises if gradients would come out wrong; `is_split`: in a backward of two halves."""
        if self.found is None:
            return
        name, wrapper = self.found
        if wrapper.takes_full_backwards and not is_split:
            return
        where = f"its module {name!r} has" if name else "it has"
        remedy = (
            "Use a schedule with full backwards, such as 1F1B or Interleaved1F1B"
            if wrapper.takes_full_backwards
            else "Use fully_shard with a schedule of full backwards, such as 1F1B"
        )
        raise StageError(
            f"{place}: {where} {wrapper.name}, which "
            f"gives wrong gradients in {'a split backward' if is_split else 'a pipeline'}. "
            f"{remedy}; or wrap the whole stage in DistributedDataParallel, which works with every "
            "schedule."
        )

    def replica_group(self, module: nn.Module, place: str) -> dist.ProcessGroup | None:
        """The ranks over which the gradients of `module` are averaged, if they are."""
        if self.ddp is not None:
            return self.ddp.process_group
        if self.found is None:
            return None
        meshes = {p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")}
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            raise StageError(
                f"{place} is sharded over several "
                "meshes, or one of several dimensions, and does not say over which ranks the "
                "batch is spread. Give the pipeline the replica_group."
            )
        group: dist.ProcessGroup = mesh.get_group()
        return group
