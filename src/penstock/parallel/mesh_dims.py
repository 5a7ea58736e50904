"""The meanings of a mesh's dimensions, by name."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm import DryGroup, LocalGroup
from penstock.errors import StageError
from penstock.stage import GroupOrMesh

_MEANINGS = {
    "pp": "pipeline",
    "dp": "replicas",
    "dp_replicate": "replicas",
    "fsdp": "shards",
    "dp_shard": "shards",
    "tp": "tensor",
}


@dataclass(frozen=True, slots=True)
class MeshDims:
    """The meshes of one dimension that a pipeline is made with."""

    pipeline: GroupOrMesh
    replicas: DeviceMesh | None = None
    """The ranks that hold whole copies of a stage, for DistributedDataParallel."""
    shards: DeviceMesh | None = None
    """The ranks among which fully_shard spreads parameters; with replicas, a mesh of both."""
    tensor: DeviceMesh | None = None
    """The ranks among which layers are spread, for tensor parallelism."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, group: GroupOrMesh) -> "MeshDims":
        """Read a mesh by the names of its dimensions; without one, all ranks are the pipeline's."""
        if mesh is None:
            return cls(group)
        if group is not None:
            raise StageError(
                "mesh and group were both given, and each says which ranks the pipeline has. "
                "Give one."
            )
        found = _by_meaning(mesh)
        if "pipeline" not in found:
            raise StageError(
                f"the mesh has the dimensions {_names(mesh)}, and none is the pipeline's. Expected "
                "one that is named 'pp'; it may have size 1."
            )
        replicas, shards = found.get("replicas"), found.get("shards")
        dims: dict[str, Any] = {"pipeline": mesh[found["pipeline"]]}
        if shards is not None:
            dims["shards"] = mesh[shards if replicas is None else (replicas, shards)]
        elif replicas is not None:
            dims["replicas"] = mesh[replicas]
        if "tensor" in found:
            dims["tensor"] = mesh[found["tensor"]]
        return cls(**dims)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number in its pipeline, and the number of ranks there."""
        if isinstance(self.pipeline, LocalGroup | DryGroup):
            return self.pipeline.rank, self.pipeline.num_ranks
        if isinstance(self.pipeline, DeviceMesh):
            return self.pipeline.get_local_rank(), self.pipeline.size()
        return dist.get_rank(self.pipeline), dist.get_world_size(self.pipeline)

    @property
    def peer_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that hold this rank's stages too, or shards of them: a group by dimension."""
        meshes = (self.replicas, self.shards, self.tensor)
        return [
            mesh.get_group(dim) for mesh in meshes if mesh is not None for dim in range(mesh.ndim)
        ]


def _by_meaning(mesh: DeviceMesh) -> dict[str, str]:
    """Return the names of the dimensions, by what they are for."""
    if not isinstance(mesh, DeviceMesh):
        raise StageError(
            f"mesh is a {type(mesh).__name__}. Expected a DeviceMesh, such as "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp")).'
        )
    found: dict[str, str] = {}
    for name in mesh.mesh_dim_names or ():
        meaning = _MEANINGS.get(name)
        if meaning is None or meaning in found:
            raise StageError(
                f"the mesh has the dimensions {_names(mesh)}, and {name!r} is "
                f"{'unknown' if meaning is None else f'the second one for {meaning}'}. Expected "
                "'pp' for the pipeline, 'dp' or 'dp_replicate' for replicas, 'fsdp' or 'dp_shard' "
                "for sharded parameters, 'tp' for tensor parallelism, each once. Other "
                "parallelisms are yours to apply: make the stages yourself, with PipelineStage."
            )
        found[meaning] = name
    return found


def _names(mesh: DeviceMesh) -> str:
    return ", ".join(map(repr, mesh.mesh_dim_names or ())) or "without names"
