"""Wrappers of a stage's module that reduce or shard its gradients."""

from collections.abc import Collection
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.backward.settling import signal
from penstock.backward.sharding import Sharding
from penstock.backward.wrappers import find_wrapper
from penstock.errors import StageError
from penstock.torch_private import prepare_reducer, unready_parameters


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The wrappers of a stage's module; `place` names the stage in error messages."""

    ddp: DistributedDataParallel | None
    """The wrapper around the whole module, if there is one: it works with every schedule."""
    sharding: Sharding
    """The modules that fully_shard or replicate was called on: they work with every schedule."""
    refused: tuple[str, str] | None
    """A wrapper that no schedule works with, after the name of the module that has it."""
    outside: str | None
    """A parameter that nobody would reduce, in a stage of which only a part is sharded."""
    averaging_ranks: frozenset[int]
    """The ranks that average gradients, numbered among all processes."""
    reduced: tuple[tuple[str, nn.Parameter], ...] = ()
    """The parameters that DistributedDataParallel reduces, in its own order."""

    @classmethod
    def of(cls, module: nn.Module, place: str) -> "Wrapping":
        """Find the wrappers; raise an error for options that do not work with any schedule."""
        ddp = module if isinstance(module, DistributedDataParallel) else None
        for option in ("find_unused_parameters", "static_graph"):
            if ddp is not None and getattr(ddp, option):
                raise StageError(
                    f"{place} is wrapped in DistributedDataParallel with "
                    f"{option}=True, which looks for parameters in a graph that a pipeline does "
                    "not give it. Leave that out, and make sure that every parameter is used."
                )
        sharding = Sharding(module)
        outside = sharding.outside(module) if sharding else None
        ranks = sharding.replica_ranks()
        reduced: tuple[tuple[str, nn.Parameter], ...] = ()
        if ddp is not None:
            ranks.update(dist.get_process_group_ranks(ddp.process_group))
            named = ddp.module.named_parameters()
            reduced = tuple((name, weight) for name, weight in named if weight.requires_grad)
        return cls(ddp, sharding, find_wrapper(module), outside, frozenset(ranks), reduced)

    @property
    def is_reduced(self) -> bool:
        """True if gradients are averaged over replicas."""
        return self.ddp is not None or bool(self.sharding)

    def check(self, place: str, pipeline_ranks: Collection[int]) -> None:
        """Raise an error if gradients would be wrong, in a pipeline of these ranks."""
        if len(both := self.averaging_ranks.intersection(pipeline_ranks)) > 1:
            raise StageError(
                f"{place}: its gradients are averaged over ranks {sorted(self.averaging_ranks)}, "
                f"of which {sorted(both)} hold stages of the same pipeline. Give fully_shard the "
                "mesh, or DistributedDataParallel the process_group, of the ranks that hold this "
                "stage."
            )
        if self.refused is not None:
            name, wrapper = self.refused
            raise StageError(
                f"{place}: {f'its module {name!r}' if name else 'it'} has {wrapper}, which gives "
                "wrong gradients in a pipeline. Use fully_shard (FSDP2), or wrap the whole stage "
                "in DistributedDataParallel: both work with every schedule."
            )
        if self.outside is not None:
            raise StageError(
                f"{place}: its parameter {self.outside!r} is in no module that was sharded, while "
                "others are: its gradient would not be averaged, and the replicas would drift "
                "apart. Call fully_shard on the whole stage too, after its parts."
            )

    def expect_last_grads(self) -> None:
        """Let DistributedDataParallel reduce gradients in the backward that comes next."""
        if self.ddp is not None:
            prepare_reducer(self.ddp)

    def reduce_late_grads(self, place: str) -> None:
        """Complete a reduction that waits for parameters which the last backward did not reach.

        Raise an error if one of them has no gradient: other replicas may have one.
        """
        if self.ddp is None or not self.reduced:
            return
        if missing := [name for name, weight in self.reduced if weight.grad is None]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StageError(
                f"{place}: its parameter {missing[0]!r}{more} got no gradient in this step, so "
                "DistributedDataParallel cannot average the gradients of the stage over replicas. "
                "Expected all parameters that are trained to be used in each step: freeze those "
                "that are not with requires_grad_(False), before the stage is wrapped, or use "
                "fully_shard, which parallelize() does with a mesh dimension 'fsdp'."
            )
        # If the last backward reached none of them, DDP does not say that it waits before one is
        # ready; if it has reduced all, one more is nothing to it.
        if not unready_parameters(self.ddp):
            signal([self.reduced[0][1]])
        signal(self.reduced[number][1] for number in unready_parameters(self.ddp))

    @property
    def known_replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks that average gradients, by dimension of their mesh.

        Empty if there are none, or if parameters have different meshes.
        """
        if self.ddp is not None:
            return (self.ddp.process_group,)
        return tuple(self.sharding.replica_groups())

    def replica_groups(self, place: str) -> tuple[dist.ProcessGroup, ...]:
        """Return the known groups; raise an error if there are some, but not which."""
        if self.sharding and not self.known_replica_groups:
            raise StageError(
                f"{place} is sharded over several meshes, so Penstock cannot tell which ranks the "
                "batch is spread over. Give the pipeline the replica_group."
            )
        return self.known_replica_groups
