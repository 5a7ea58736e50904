"""Gathers, frees and reductions of a schedule are executed where they stand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mesh_training
from fuzzing import rotated
from local_steps import mean_square
from mesh_training import Case, Meshes, make_meshes, make_stages
from penstock import CostTable, Pipeline, PipelineStage, Schedule, compat, schedules
from penstock.ir import Action, Backward, BackwardInput, BackwardWeight
from penstock.ir.action import SHARDING_TYPES, compute_parts
from penstock.passes import Gathers, add_gathers
from penstock.passes.held_memory import changes_along
from penstock.runtime.step import Step
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

POLICIES = {
    str(policy): policy
    for policy in (
        Gathers.once(),
        Gathers.per_need(),
        Gathers.per_need(ahead=0),
        Gathers.at_most(1),
    )
}


def with_gathers(name: str, policy: Gathers) -> Schedule:
    if name == "DualPipeV":  # Its overlaps need two stages at once.
        policy = replace(policy, most=max(policy.most, 2))
    return add_gathers(schedules.get(name)(num_ranks=2, num_microbatches=4), policy)


def train(_: dist.ProcessGroup, name: str, policy: Gathers) -> tuple[mesh_training.Found, int]:
    schedule = with_gathers(name, policy)

    def make_step(
        case: Case, modules: list[nn.Sequential], meshes: Meshes
    ) -> tuple[dict[int, nn.Module], Any]:
        rank = meshes["pp"].get_local_rank()
        own = {
            stage: mesh_training.WRAPPINGS[case.wrapping].wrap(modules[stage], meshes)
            for stage in schedule.placement.stages_of(rank)
        }
        stages = [
            PipelineStage(module, stage, schedule.num_stages, "cpu", group=meshes["pp"].get_group())
            for stage, module in own.items()
        ]
        return own, Pipeline(stages, schedule, loss_fn=mean_square).step

    found = mesh_training.run_case(Case("plain", "FSDP2", name), make_step)
    rank = dist.get_rank() // 2
    unshards = sum(str(action).endswith("UNSHARD") for action in schedule.orders[rank])
    return found, unshards


@rotated(name=["ZB-V", "1F1B", "V-Half", "DualPipeV"], policy=POLICIES)
def test_stages_are_gathered_as_often_as_the_schedule_says(
    name: str, policy: Gathers, fresh_pool: WorkerPool
) -> None:
    for found, unshards in fresh_pool.run(4, train, name, policy):
        assert found.difference < 1e-12
        assert found.num_groups == found.reductions
        # Each stage has two groups. The first stage, whose inputs need no gradient, computes all
        # of its backward in W, and may gather again for it.
        assert 2 * unshards <= found.gathers <= 2 * unshards + 2


def train_with_limits(
    _: dist.ProcessGroup, name: str, options: dict[str, Any]
) -> tuple[mesh_training.Found, int]:
    """With a class of compat, whose arguments say what is gathered when."""
    placed: list[Schedule] = []

    def make_step(
        case: Case, modules: list[nn.Sequential], meshes: Meshes
    ) -> tuple[dict[int, nn.Module], Any]:
        group = meshes["pp"].get_group()
        placement = schedules.get(name)(num_ranks=2, num_microbatches=4).placement
        own = {
            stage: mesh_training.WRAPPINGS[case.wrapping].wrap(modules[stage], meshes)
            for stage in placement.stages_of(meshes["pp"].get_local_rank())
        }
        stages = [
            compat.PipelineStage(module, stage, placement.num_stages, "cpu", group=group)
            for stage, module in own.items()
        ]
        kind = compat.get_schedule_class(name)
        schedule: Any = kind(stages, 4, loss_fn=mean_square, **options)  # type: ignore[arg-type]
        placed.append(schedule.schedule)
        return own, schedule.step

    found = mesh_training.run_case(Case("plain", "FSDP2", name), make_step)
    rank = dist.get_rank() // 2
    unshards = sum(str(action).endswith("UNSHARD") for action in placed[0].orders[rank])
    return found, unshards


@rotated(
    name=["Interleaved1F1B", "ZB-V"],
    options=[{"max_active_stages": 1}, {"unshard_lookahead": (1, 2)}],
)
def test_limits_of_torch_s_classes_are_kept(
    name: str, options: dict[str, Any], fresh_pool: WorkerPool
) -> None:
    for found, unshards in fresh_pool.run(4, train_with_limits, name, options):
        assert found.difference < 1e-12
        assert found.num_groups == found.reductions
        assert 2 * unshards <= found.gathers <= 2 * unshards + 2


def held_bytes(module: nn.Module) -> int:
    """The bytes of gathered parameters, and of gathers that nobody has waited for."""
    total = 0
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state"):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                if group._all_gather_result is not None:
                    total += group._all_gather_result.all_gather_output.untyped_storage().nbytes()
                for param in group.fsdp_params:
                    for gathered in getattr(param, "all_gather_outputs", ()):
                        total += gathered.untyped_storage().nbytes()
    return total


def measure(
    _: dist.ProcessGroup, schedule: Schedule, **options: bool
) -> tuple[list[tuple[Action, int]], dict[int, int]]:
    """What is held after each action of a step, and the bytes of each stage."""
    meshes = make_meshes("FSDP2")
    modules = make_stages("plain", schedule.num_stages)
    sizes = {
        stage: sum(p.numel() * p.element_size() for p in module.parameters())
        for stage, module in enumerate(modules)
    }
    rank = meshes["pp"].get_local_rank()
    stages = []
    for stage in schedule.placement.stages_of(rank):
        module = mesh_training.WRAPPINGS["FSDP2"].wrap(modules[stage], meshes)
        group = meshes["pp"].get_group()
        stages.append(
            PipelineStage(module, stage, schedule.num_stages, "cpu", group=group, **options)
        )
    pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
    x, target = torch.randn(2, 8, 4, mesh_training.WIDTH).double()
    x.requires_grad_()  # So that the first stage has an input backward too.
    pipeline.step(x, target=target)
    seen: list[tuple[Action, int]] = []
    originals = Step._run, Step._gather_or_reduce

    def noting(original: Any) -> Any:
        def run(step: Step, what: Any) -> None:
            original(step, what)
            action = getattr(what, "action", what)
            seen.append((action, sum(held_bytes(stage.submod) for stage in stages)))

        return run

    Step._run, Step._gather_or_reduce = map(noting, originals)
    try:
        pipeline.step(x, target=target)
    finally:
        Step._run, Step._gather_or_reduce = originals
    return seen, sizes


@rotated(name=["ZB-V", "V-Half"], policy=POLICIES)
def test_bytes_of_gathered_parameters_are_those_of_the_simulation(
    name: str, policy: Gathers, fresh_pool: WorkerPool
) -> None:
    schedule = with_gathers(name, policy)
    for number, (seen, sizes) in enumerate(fresh_pool.run(4, measure, schedule)):
        rank = number // 2
        costs = CostTable.uniform(schedule.num_stages, after_forward=0, after_input=0)
        footprint = replace(costs, gathered=tuple(map(float, sizes.values())))
        held, expected = 0.0, []
        for action, change in zip(
            schedule.orders[rank], changes_along(schedule, rank, footprint), strict=True
        ):
            held += change.net
            expected += [(part, held) for part in compute_parts(action)]
            if isinstance(action, SHARDING_TYPES):
                expected.append((action, held))
        assert expected == seen


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "DualPipeV"])
def test_stage_stays_gathered_from_a_backward_to_the_next_forward(
    name: str, fresh_pool: WorkerPool
) -> None:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    for seen, sizes in fresh_pool.run(4, measure, schedule):
        held = dict.fromkeys(sizes, 0)
        expected = []
        for action, _ in seen:
            if isinstance(action, Backward | BackwardInput):
                held[action.stage] = sizes[action.stage]
            elif not isinstance(action, BackwardWeight):  # A forward, a free or a reduction.
                held[action.stage] = 0
            expected.append((action, sum(held.values())))
        assert expected == seen


def measure_freed(group: dist.ProcessGroup, schedule: Schedule) -> Any:
    return measure(group, schedule, frees_after_backward=True)


def test_stage_that_frees_after_backwards_holds_no_more_than_the_block_gathered_ahead(
    fresh_pool: WorkerPool,
) -> None:
    schedule = schedules.get("ZB-V")(num_ranks=2, num_microbatches=4)
    for seen, sizes in fresh_pool.run(4, measure_freed, schedule):
        held_stages = {action.stage for action, _ in seen}
        # Of the two blocks of a stage, FSDP2 may have begun to gather the next one.
        most = sum(sizes[stage] // 2 for stage in held_stages)
        assert max(held for _, held in seen) <= most
