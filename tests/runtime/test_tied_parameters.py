"""Tied parameters: every copy gets the gradient of all, as if they were one parameter.

All ranks are in this process; `tests/dist/test_tied_on_processes.py` has real ones.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import rotated
from local_steps import FOUR_STAGES
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, schedules
from stage_training import CPU, SOME_NAMES, TRAINING_NAMES, assert_close, assert_same_grads
from tied_models import (
    Named,
    TiedRun,
    TiedStage,
    assert_copies_are_equal,
    assert_trains_as_unsplit,
    grads_by_name,
    loss_fn,
    make_tied_pipeline,
    tie_up,
    tied_batch,
    tied_stages,
    train_tied,
)

NUM_STAGES = 4
every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)
BATCH = tied_batch(8, 0)


def check(run: TiedRun) -> None:
    assert_trains_as_unsplit(run, penstock.local_ranks(run.num_ranks, train_tied, run))


@rotated(schedule=TRAINING_NAMES, num_ranks=[4, 2, 4, 1])
def test_copies_train_as_one_parameter(schedule: str, num_ranks: int) -> None:
    check(TiedRun(schedule, num_ranks))


@pytest.mark.parametrize("schedule", SOME_NAMES)
def test_gradients_of_several_steps_are_added_up(schedule: str) -> None:
    check(TiedRun(schedule, 4, steps_per_update=2))


@pytest.mark.parametrize("schedule", SOME_NAMES)
def test_dynamic_shapes(schedule: str) -> None:
    check(TiedRun(schedule, 2, is_dynamic=True))


@rotated(schedule=SOME_NAMES, steps_per_update=[1, 2])
def test_copy_that_is_frozen_trains_as_the_others_do(schedule: str, steps_per_update: int) -> None:
    """It adds nothing, and the optimizer must still see a gradient, or the copies would part."""
    check(TiedRun(schedule, 2, has_frozen_head=True, steps_per_update=steps_per_update))


@rotated(schedule=SOME_NAMES, steps_per_update=[2, 1])
def test_sparse_gradients_are_made_dense(schedule: str, steps_per_update: int) -> None:
    check(TiedRun(schedule, 2, sparse=True, steps_per_update=steps_per_update))


def step(pipeline: Pipeline) -> None:
    pipeline.step(BATCH[0], target=BATCH[1])


def run(
    modules: list[TiedStage],
    schedule: Schedule,
    main: Callable[[Pipeline], Any] = step,
    **options: Any,
) -> list[Any]:
    """Call `main` with each rank's pipeline of these modules; returns what they returned."""

    def on_rank(group: LocalGroup) -> Any:
        return main(make_tied_pipeline(group, schedule, dict(enumerate(modules)), **options))

    return penstock.local_ranks(schedule.num_ranks, on_rank)


def unsplit_grads(modules: list[TiedStage], tokens: Tensor = BATCH[0], num_steps: int = 1) -> Named:
    """Those of a copy of the model in which tied parameters are one."""
    own = copy.deepcopy(modules)
    tie_up(own)
    for module in own:
        module.zero_grad()
    for _ in range(num_steps):
        loss_fn(nn.Sequential(*own)(tokens), BATCH[1]).backward()
    return grads_by_name(dict(enumerate(own)))


def grads_of(modules: list[TiedStage]) -> Named:
    return grads_by_name(dict(enumerate(modules)))


class Unused(nn.Module):
    """A head that does not use its weight, which is laid out as no gradient would be by itself."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().T.contiguous().T)
        self.bias = nn.Parameter(torch.zeros(head.out_features).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.bias + x.sum(-1, keepdim=True)


def without_use() -> list[TiedStage]:
    """Stages of which the last holds its copy of the embedding in vain."""
    modules = tied_stages(NUM_STAGES)
    modules[-1].head = Unused(modules[-1].head)  # type: ignore[arg-type, assignment]
    return modules


@every_schedule
def test_copy_without_a_use_gets_the_gradient_of_the_others(schedule: Schedule) -> None:
    modules = without_use()
    run(modules, schedule)
    assert_same_grads("step", unsplit_grads(modules), [grads_of(modules)])
    assert_copies_are_equal(grads_of(modules), NUM_STAGES)
    weight = modules[-1].head.weight  # type: ignore[union-attr]
    assert weight.stride() == weight.grad.stride()


@rotated(schedule=FOUR_STAGES, has_grad={"none before": False, "some before": True})
def test_gradient_stays_as_it_was_if_nobody_adds_to_it(schedule: Schedule, has_grad: bool) -> None:
    modules = without_use()
    modules[0].embed.requires_grad_(False)  # type: ignore[union-attr]
    copies = [modules[0].embed.weight, modules[-1].head.weight]  # type: ignore[union-attr]
    before = [torch.randn_like(weight) if has_grad else None for weight in copies]
    for weight, grad in zip(copies, before, strict=True):
        weight.grad = grad
    expected = [None if grad is None else grad.clone() for grad in before]
    run(modules, schedule)
    for weight, grad, values in zip(copies, before, expected, strict=True):
        assert weight.grad is grad
        assert values is None or torch.equal(values, weight.grad)  # type: ignore[arg-type]


@every_schedule
def test_gradient_keeps_the_memory_that_it_had(schedule: Schedule) -> None:
    """A caller may have put all gradients into one buffer, say."""
    modules = tied_stages(NUM_STAGES)
    copies = [modules[0].embed.weight, modules[-1].head.weight]  # type: ignore[union-attr]
    buffers = [torch.zeros_like(weight) for weight in copies]
    for weight, buffer in zip(copies, buffers, strict=True):
        weight.grad = buffer
    run(modules, schedule)
    assert_same_grads("step", unsplit_grads(modules), [grads_of(modules)])
    for weight, buffer in zip(copies, buffers, strict=True):
        assert weight.grad is buffer


def test_gradient_that_was_sparse_before_the_step_is_added_to() -> None:
    modules = tied_stages(NUM_STAGES)
    weight = modules[0].embed.weight  # type: ignore[union-attr]
    expected = unsplit_grads(modules)["0.embed.weight"]
    before = torch.randn_like(weight)
    weight.grad = before.to_sparse()
    run(modules, FOUR_STAGES["1F1B"])
    assert_close("embedding", before + expected, weight.grad)  # type: ignore[operator]


def test_gradients_of_another_dtype_than_their_parameters() -> None:
    modules = [module.float() for module in tied_stages(NUM_STAGES)]
    copies = [modules[0].embed.weight, modules[-1].head.weight]  # type: ignore[union-attr]
    for weight in copies:
        weight.grad_dtype = torch.float64
    run(modules, FOUR_STAGES["1F1B"])
    assert [torch.float64] * 2 == [weight.grad.dtype for weight in copies]  # type: ignore[union-attr]
    assert_copies_are_equal(grads_of(modules), NUM_STAGES)


@rotated(name=["ZB-V", "V-Half", "V-Min", "DualPipeV"], num_steps=[1, 2])
def test_stages_of_a_rank_that_share_the_parameter_itself_count_it_once(
    name: str, num_steps: int
) -> None:
    """The first rank of a V has the first stage and the last."""
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = tied_stages(NUM_STAGES)
    modules[-1].head.weight = modules[0].embed.weight  # type: ignore[union-attr]
    modules[-1].mixture = modules[0].mixture
    expected = unsplit_grads(modules, num_steps=num_steps)
    run(modules, schedule, lambda pipeline: [step(pipeline) for _ in range(num_steps)])
    assert_same_grads("step", expected, [grads_of(modules)])


def test_caller_graph_that_leads_to_a_tied_parameter_adds_to_it() -> None:
    modules = tied_stages(NUM_STAGES)
    expected = unsplit_grads(modules)

    def main(pipeline: Pipeline) -> None:
        embed = modules[0].embed
        if 0 not in pipeline.stages or embed is None:
            pipeline.step(target=BATCH[1])
            return
        modules[0].embed = nn.Identity()  # type: ignore[assignment]
        modules[0].embed.weight = embed.weight  # type: ignore[union-attr]
        pipeline.step(embed(BATCH[0]), target=BATCH[1])

    run(modules, FOUR_STAGES["1F1B"], main)
    assert_same_grads("step", expected, [grads_of(modules)])


def test_parameter_that_was_replaced_between_steps_is_found() -> None:
    """As `load_state_dict(assign=True)` does it."""
    modules = tied_stages(NUM_STAGES)

    def main(pipeline: Pipeline) -> None:
        step(pipeline)
        for stage in pipeline.stages.values():
            values = {name: param.detach() for name, param in stage.submod.named_parameters()}
            stage.submod.load_state_dict(values, assign=True)
            stage.submod.zero_grad()
        step(pipeline)

    run(modules, FOUR_STAGES["ZB-V"], main)
    assert_same_grads("step", unsplit_grads(modules), [grads_of(modules)])


@pytest.mark.parametrize("name", SOME_NAMES)
def test_callback_comes_when_the_exchange_is_over(name: str) -> None:
    """Once per stage; first for the stages that hold no tied parameter, as they complete."""
    schedule = schedules.get(name)(num_ranks=4, num_microbatches=8)
    modules = tied_stages(schedule.num_stages)
    seen: list[tuple[int, Named]] = []

    def on_grads_ready(stage: PipelineStage) -> None:
        seen.append((stage.stage_index, grads_by_name({stage.stage_index: stage.submod})))

    run(modules, schedule, on_grads_ready=on_grads_ready)
    final = grads_of(modules)
    assert list(range(schedule.num_stages)) == sorted(index for index, _ in seen)
    for _, grads in seen:
        assert all(torch.equal(final[key], grads[key]) for key in grads)  # type: ignore[arg-type]
    for rank in range(schedule.num_ranks):
        held = schedule.placement.stages_of(rank)
        has_ties = [bool(modules[index].tied) for index, _ in seen if index in held]
        assert sorted(has_ties) == has_ties


def test_forward_only_schedule_leaves_gradients_alone() -> None:
    schedule = schedules.get("ForwardOnly")(num_ranks=4, num_microbatches=4)
    modules = tied_stages(schedule.num_stages)
    run(modules, schedule)
    assert all(grad is None for grad in grads_of(modules).values())


def test_callback_does_not_wait_for_a_name_that_only_one_stage_holds() -> None:
    schedule = schedules.get("ZB-V")(num_ranks=1, num_microbatches=4)
    modules, seen = tied_stages(2), []

    def main(group: LocalGroup) -> None:
        stages = [
            PipelineStage(modules[0], 0, 2, CPU, group=group),
            PipelineStage(modules[1], 1, 2, CPU, group=group, tied={"mixture": "alone"}),
        ]
        step(Pipeline(stages, schedule, loss_fn=loss_fn, on_grads_ready=seen.append))

    penstock.local_ranks(1, main)
    assert [1, 0] == [stage.stage_index for stage in seen]
