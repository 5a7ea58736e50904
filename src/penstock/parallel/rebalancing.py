"""Move layers between the ranks of a model, by how fast the ranks are.

    speeds of all ranks [1]   new cut of an empty copy [2]   tensors move [3]   new pipeline [4]

Nothing changes before [3], so whatever is refused leaves the training as it was.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comm.plain_values import to_bytes
from penstock.cutting import Balanced, CutModel, cut_any
from penstock.errors import PartitionError
from penstock.ir import Placement, StageId
from penstock.parallel.example_batch import Microbatch
from penstock.parallel.given_cut import Cut
from penstock.parallel.mesh_dims import MeshDims
from penstock.parallel.moved_tensors import (
    HeldTensors,
    Moving,
    names_in,
    put_in_place,
    refill,
)
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.saved_folder import SavedModel
from penstock.parallel.transformers_parts import skeleton_of
from penstock.runtime import Pipeline
from penstock.runtime.pipeline_successor import (
    exchange,
    has_open_grads,
    stage_times,
    take_over,
)
from penstock.stage import GroupOrMesh, PipelineStage
from penstock.torch_private import grad_and_hooks, hooks_of_calls, pytree

LOGGER = logging.getLogger("penstock")
_WHAT = "to move layers between ranks"
_PLACES = 2
"""The decimals of a rank's speed: measured times differ by more than that."""


class Rebalanced(NamedTuple):
    """A pipeline with its layers on other ranks."""

    pipeline: Pipeline
    pieces: CutModel


@dataclass(slots=True)
class Recutting:
    """What it takes to cut a model again."""

    skeleton: nn.Module
    """The model without values."""
    policy: Balanced
    """That of the present cut."""
    placement: Placement
    microbatch: Microbatch
    device: torch.device
    group: GroupOrMesh
    make_pipeline: Callable[[Sequence[PipelineStage]], Pipeline]

    @classmethod
    def of(
        cls,
        skeleton: nn.Module | str,
        cut: Cut,
        placement: Placement,
        microbatch: Microbatch,
        device: torch.device,
        group: GroupOrMesh,
        make_pipeline: Callable[[Sequence[PipelineStage]], Pipeline],
    ) -> "Recutting | str":
        """Keep what it takes to cut a model again; or why it cannot be, if there is no copy."""
        if isinstance(skeleton, str):
            return skeleton
        assert isinstance(cut, Balanced)  # Otherwise there is no copy.
        kept = _keep(microbatch)
        return cls(skeleton, cut, placement, kept, device, group, make_pipeline)

    def rebalance(
        self, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None
    ) -> Rebalanced | None:
        """Move layers to where they take least; return None if they are there already."""
        rank = next(iter(pipeline.stages.values())).group_rank
        old, problem, held, settings = None, "", None, None
        try:
            self._check(pipeline)
            old = HeldTensors([s.submod for s in pipeline.stages.values()], optimizer, self.device)
            held, settings = old.describe(), old.settings()
            to_bytes(settings)
        except PartitionError as error:
            problem = str(error)
        except TypeError as error:  # It is not data.
            problem = f"the settings of the optimizer cannot be moved: {error}"
        facts = (problem, stage_times(pipeline), held, None if problem else settings)
        ranks = pipeline.gather(facts, _WHAT)
        _raise_first([one for one, *_ in ranks])
        _check_optimizers([settings for *_, settings in ranks])
        assert old is not None
        measured = {stage: seconds for _, times, *_ in ranks for stage, seconds in times.items()}
        policy = self._with_speeds(pipeline, measured)  # [1]
        pieces = self._cut(policy)  # [2]
        if pieces.cut == next(iter(pipeline.stages.values())).cut:
            self._log(rank, "kept the cut: layers are where they take least", policy)
            return None
        _check_ties(pieces)
        modules = {i: pieces.modules[i] for i in self.placement.stages_of(rank)}
        wanted = [names[0] for module in modules.values() for names in names_in(module)]
        moving = Moving(
            rank,
            self.device,
            old,
            [holdings for _, _, holdings, _ in ranks],
            pipeline.gather(list(dict.fromkeys(wanted)), _WHAT),
        )
        moving.check()
        modes = pipeline.gather(_modes(pipeline), _WHAT)
        moved = moving.run(lambda sent, received: exchange(pipeline, sent, received))  # [3]
        placed: dict[str, Tensor] = {}
        stages = []
        for index, module in modules.items():
            own = put_in_place(module, moved)
            stages.append(pieces.build_stage(index, self.device, self.group, buffers=own))
            placed |= own
            _set_modes(module, modes)
        if optimizer is not None:
            refill(optimizer, moved, placed)
        successor = self.make_pipeline(stages)  # [4]
        take_over(successor, pipeline)
        self.policy = policy
        self._log(rank, f"moved layers between ranks: {pieces.cut}", policy)
        return Rebalanced(successor, pieces)

    def _check(self, pipeline: Pipeline) -> None:
        """Raise an error for what cannot be moved."""
        if not stage_times(pipeline):
            raise PartitionError(
                "the times of the stages are not known yet. Expected some steps of a pipeline "
                "that measures them: give parallelize() slow_when=0.5 or schedule='auto', and run "
                "at least 8 steps before."
            )
        if has_open_grads(pipeline):
            raise PartitionError(
                "the last step was run with finalize=False, so its gradients are not complete. "
                "Move layers after a step that completes them."
            )
        for index, stage in pipeline.stages.items():
            if stage.tied:
                raise PartitionError(_tied(index))
            for name, module in stage.submod.named_modules():
                if any(hooks_of_calls(module)) and not self._has_hooks(name):
                    raise PartitionError(
                        f"the module {name!r} of stage {index} has hooks that the model did not "
                        "have, and which cannot be moved. Remove them before."
                    )
            for name, parameter in stage.submod.named_parameters():
                if any(grad_and_hooks(parameter)[1:]):
                    raise PartitionError(
                        f"the parameter {name!r} of stage {index} has hooks, which cannot be "
                        "moved. Remove them before, and add them again after."
                    )
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise PartitionError(
                        f"the gradient of {name!r} of stage {index} is sparse, and cannot be "
                        "moved. Move layers after zero_grad()."
                    )

    def _has_hooks(self, name: str) -> bool:
        modules = dict(self.skeleton.named_modules())
        return name in modules and any(hooks_of_calls(modules[name]))

    def _with_speeds(self, pipeline: Pipeline, measured: Mapping[StageId, float]) -> Balanced:
        """Return the policy with the speeds of the ranks: planned cost ÷ measured time [1]."""
        chosen: list[Any] = []
        try:
            pieces = self._cut(replace(self.policy, on_choice=chosen.append))
        except Exception as error:
            raise PartitionError(
                f"an empty copy of the model cannot be cut ({type(error).__name__}: {error}). Its "
                "layers cannot be moved: save a checkpoint, and load it with another cut."
            ) from error
        present = next(iter(pipeline.stages.values())).cut
        if pieces.cut != present:
            raise PartitionError(
                f"an empty copy of the model was cut into {pieces.cut}, but the model into "
                f"{present}, so its layers cannot be found again. Save a checkpoint, and load it "
                "with another cut."
            )
        costs = chosen[-1].rank_costs
        before = self.policy.speeds or (1.0,) * len(costs)
        speeds = [
            cost * speed / sum(measured[stage] for stage in self.placement.stages_of(rank))
            for rank, (cost, speed) in enumerate(zip(costs, before, strict=True))
        ]
        least = 10.0**-_PLACES
        rounded = [max(round(speed / max(speeds), _PLACES), least) for speed in speeds]
        return replace(self.policy, speeds=tuple(rounded))

    def _cut(self, policy: Balanced) -> CutModel:
        """Cut an empty copy of the model."""
        args, kwargs = self.microbatch.args, self.microbatch.kwargs
        return cut_any(skeleton_of(self.skeleton), policy, args, kwargs)

    def _log(self, rank: int, done: str, policy: Balanced) -> None:
        if rank == 0:
            speeds = ", ".join(f"{speed:.2f}" for speed in policy.speeds or ())
            LOGGER.info("%s (speeds of the ranks: %s)", done, speeds)


def _keep(microbatch: Microbatch) -> Microbatch:
    """Return a copy of an example that does not keep the whole batch in memory."""
    kept = pytree.tree_map_only(
        Tensor,
        lambda tensor: tensor.detach().clone(),
        (microbatch.args, microbatch.kwargs, microbatch.target),
    )
    return Microbatch(*kept)


def empty_copy(
    model: nn.Module | Pretrained,
    saved: SavedModel | None,
    dims: MeshDims,
    cut: Cut,
    *,
    is_compiled: bool,
    steps_in_backward: bool,
) -> nn.Module | str:
    """Return a copy of a model without values, or why its layers cannot be moved."""
    if dims.replicas is not None or dims.shards is not None or dims.tensor is not None:
        return "its stages are replicated, sharded or tensor parallel"
    if is_compiled:
        return "its stages are compiled"
    if steps_in_backward:
        return "its optimizers step in the backward"
    if not isinstance(cut, Balanced | None):
        return "it was cut where the caller said"
    if isinstance(model, Pretrained):
        return model.new_model()
    if saved is not None:
        return saved.skeleton
    try:
        return skeleton_of(model)
    except Exception as error:  # It is the caller's model, and only this is lost.
        return f"no empty copy of it could be made ({type(error).__name__}: {error})"


def _tied(stage: StageId) -> str:
    return (
        f"stage {stage} has parameters that are tied to those of other stages, which cannot be "
        "moved yet. Save a checkpoint, and load it with another cut."
    )


def _check_ties(pieces: CutModel) -> None:
    for index, stage in enumerate(pieces.info().stages):
        if stage.ties:
            raise PartitionError(f"in the new cut, {_tied(index)}")


def _raise_first(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise PartitionError(f"rank {rank}: {problem}")


def _check_optimizers(ranks: Sequence[Any]) -> None:
    for rank, settings in enumerate(ranks):
        if settings != ranks[0]:
            raise PartitionError(
                f"the optimizers of rank 0 and rank {rank} differ in their kinds, or in the number "
                "or the settings of their groups, so it is not known what a parameter gets on "
                "another rank. Make them alike on all ranks."
            )


def _modes(pipeline: Pipeline) -> dict[str, bool]:
    """Return whether each module of this rank is in training mode."""
    return {
        name: module.training
        for stage in pipeline.stages.values()
        for name, module in stage.submod.named_modules()
    }


def _set_modes(stage: nn.Module, ranks: Sequence[Mapping[str, bool]]) -> None:
    known = {name: mode for modes in ranks for name, mode in modes.items()}
    for name, module in stage.named_modules():
        module.training = known.get(name, known[""])
