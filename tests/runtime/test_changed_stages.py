"""What is changed between steps takes effect in the next one, or is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import rotated
from local_steps import (
    FOUR_STAGES,
    WIDTH,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    run_locally,
    step_unsplit,
    zero_grad,
)
from penstock import Pipeline, PipelineStage, compat, schedules
from penstock.errors import AssignmentError, StageError
from stage_training import make_stages
from staged_models import MLPStage, StepRecord

every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)


def replace_stage(stage: PipelineStage) -> None:
    stage.submod = MLPStage().double()


def replace_layer(stage: PipelineStage) -> None:
    stage.submod.up = nn.Linear(WIDTH, 2 * WIDTH).double()


def replace_weight(stage: PipelineStage) -> None:
    stage.submod.up.weight = nn.Parameter(torch.randn_like(stage.submod.up.weight))


def wrap_layer(stage: PipelineStage) -> None:
    stage.submod.up = nn.Sequential(stage.submod.up, nn.Linear(2 * WIDTH, 2 * WIDTH).double())


def wrap_stage(stage: PipelineStage) -> None:
    stage.submod = nn.Sequential(stage.submod, nn.Linear(WIDTH, WIDTH).double())


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if hasattr(self, "scale") else x


def freeze(stage: PipelineStage) -> None:
    stage.submod.up.weight.requires_grad_(False)


def reclass(stage: PipelineStage) -> None:
    stage.submod.up.__class__ = DoubledLinear


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def parametrise(stage: PipelineStage) -> None:
    nn.utils.parametrizations.weight_norm(stage.submod.up)


CHANGES = [
    replace_stage,
    replace_layer,
    replace_weight,
    wrap_layer,
    wrap_stage,
    freeze,
    reclass,
    parametrise,
]


@rotated(
    change={change.__name__: change for change in CHANGES},
    schedule=FOUR_STAGES,
)
def test_change_of_a_stage_takes_effect_in_the_next_step(schedule: Any, change: Any) -> None:
    """A split step's engine once kept the module that it was prepared for."""
    batch, modules = mlp_batch(), mlp()
    changed: dict[int, nn.Module] = {}

    def main(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        pipeline.step(*batch.args, target=batch.target)
        for index, stage in pipeline.stages.items():
            change(stage)
            changed[index] = stage.submod
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        return pipeline.step(*batch.args, target=batch.target, losses=losses), losses

    results = run_locally(modules, schedule, main)
    outputs, losses = next(result for result in results if result[1])
    now = [changed[index] for index in range(len(modules))]
    assert_same(step_unsplit(now, batch), StepRecord(outputs, losses, grads_of(now)))


def test_parameter_that_is_registered_between_steps_gets_its_gradient() -> None:
    batch, modules = mlp_batch(), [nn.Sequential(stage, Scale()) for stage in mlp()]

    def main(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        pipeline.step(*batch.args, target=batch.target)
        for stage in pipeline.stages.values():
            stage.submod[1].scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        return pipeline.step(*batch.args, target=batch.target, losses=losses), losses

    results = run_locally(modules, FOUR_STAGES["ZB-H1"], main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(step_unsplit(modules, batch), StepRecord(outputs, losses, grads_of(modules)))


def test_converted_stages_train_in_their_new_type() -> None:
    """In place: the parameters are the same objects, with values of another type."""
    batch, modules = mlp_batch(), mlp(2)
    schedule = schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4)

    def main(pipeline: Pipeline) -> Any:
        for stage in pipeline.stages.values():
            stage.submod.float()
        x, target = batch.args[0].float(), batch.target.float()
        pipeline.step(x, target=target)
        for stage in pipeline.stages.values():
            stage.submod.double()
            stage.submod.zero_grad()

    def again(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        main(pipeline)
        losses: list[Tensor] = []
        return pipeline.step(*batch.args, target=batch.target, losses=losses), losses

    results = run_locally(modules, schedule, again, stage_options={"dynamic_shapes": True})
    outputs, losses = next(result for result in results if result[1])
    assert_same(step_unsplit(modules, batch), StepRecord(outputs, losses, grads_of(modules)))


def test_stage_that_is_compiled_between_steps_is_not_split_inside() -> None:
    batch, modules = mlp_batch(), mlp(2)
    schedule = schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4)

    def main(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        pipeline.step(*batch.args, target=batch.target)
        for stage in pipeline.stages.values():
            stage.submod.compile(backend="aot_eager")
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        return pipeline.step(*batch.args, target=batch.target, losses=losses), losses

    with pytest.warns(UserWarning, match="stage 1 on rank 1: it was compiled by torch.compile"):
        results = run_locally(modules, schedule, main)
    outputs, losses = next(result for result in results if result[1])
    for module in modules:
        module._compiled_call_impl = None
    assert_same(step_unsplit(modules, batch), StepRecord(outputs, losses, grads_of(modules)))


def half_square(outputs: Tensor, target: Tensor) -> Tensor:
    return mean_square(outputs, target) / 2


@pytest.mark.parametrize("name", ["loss_fn", "_loss_fn"])
def test_loss_that_is_set_between_steps_is_used(name: str) -> None:
    """As knowledge distillation does, by torch's own name of the attribute too."""
    batch, modules = mlp_batch(), mlp(2)

    def main(group: penstock.LocalGroup) -> list[Tensor]:
        (stage,) = make_stages(group, modules, [group.rank])
        pipeline = compat.ScheduleZBH1(stage, 4, loss_fn=mean_square)
        pipeline.step(*batch.args, target=batch.target)
        setattr(pipeline, name, half_square)
        assert half_square is pipeline.loss_fn
        assert half_square is pipeline._loss_fn
        stage.submod.zero_grad()
        losses: list[Tensor] = []
        pipeline.step(*batch.args, target=batch.target, losses=losses)
        return losses

    losses = max(penstock.local_ranks(2, main), key=len)
    expected = step_unsplit(modules, batch, half_square)
    assert_same(expected, StepRecord(expected.outputs, losses, grads_of(modules)))


def test_scale_that_is_set_between_steps_is_used() -> None:
    batch, modules = mlp_batch(), mlp()

    def main(pipeline: Pipeline) -> None:
        pipeline.step(*batch.args, target=batch.target)
        pipeline.scale_grads = False
        for stage in pipeline.stages.values():
            stage.submod.zero_grad()
        pipeline.step(*batch.args, target=batch.target)

    run_locally(modules, FOUR_STAGES["ZB-V"], main)
    summed = grads_of(modules)
    expected = step_unsplit(modules, batch).grads
    for name, grad in expected.items():
        torch.testing.assert_close(summed[name], grad * 4, rtol=1e-10, atol=1e-12)


def test_rule_that_is_set_between_steps_is_used() -> None:
    batch, modules = mlp_batch(), mlp()
    seen = []

    def main(pipeline: Pipeline) -> None:
        pipeline.step(*batch.args, target=batch.target)
        pipeline.loss_weight = lambda target: seen.append(1) or len(target)
        pipeline.step(*batch.args, target=batch.target)

    zero_grad(modules)
    run_locally(modules, FOUR_STAGES["ZB-V"], main)
    assert 4 == len(seen)


def on_one_rank(group: penstock.LocalGroup) -> Pipeline:
    (stage,) = make_stages(group, [nn.Linear(WIDTH, WIDTH)], [0])
    return compat.Schedule1F1B(stage, 2, loss_fn=mean_square)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_n_microbatches", 4, "_n_microbatches of a Schedule1F1B cannot be changed"),
        ("num_microbatches", 4, "num_microbatches of a Schedule1F1B cannot be changed"),
        ("stages", {}, "stages of a Schedule1F1B cannot be changed: .* Set loss_fn, scale_grads"),
        ("schedule", None, "schedule of a Schedule1F1B cannot be changed"),
        ("timeout", 5, "a Schedule1F1B has no attribute 'timeout', so the assignment would"),
        ("los_fn", mean_square, "no effect; did you mean loss_fn"),
        ("_use_full_backward", True, "no attribute '_use_full_backward'"),
    ],
)
def test_assignment_to_a_pipeline_without_effect_is_refused(
    name: str, value: Any, message: str
) -> None:
    (pipeline,) = penstock.local_ranks(1, on_one_rank)
    with pytest.raises(AssignmentError, match=message):
        setattr(pipeline, name, value)


@pytest.mark.parametrize("name", ["stage_index", "num_stages", "device", "tied", "dynamic_shapes"])
def test_assignment_to_a_stage_without_effect_is_refused(name: str) -> None:
    (pipeline,) = penstock.local_ranks(1, on_one_rank)
    with pytest.raises(AssignmentError, match=f"{name} of a PipelineStage cannot be changed"):
        setattr(pipeline.stages[0], name, 1)
    with pytest.raises(AssignmentError, match="a PipelineStage has no attribute 'module'"):
        pipeline.stages[0].module = nn.Linear(1, 1)


def test_subclass_may_have_attributes_of_its_own() -> None:
    class Counting(compat.Schedule1F1B):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.early = 0
            super().__init__(*args, **kwargs)
            self.count = 0

    def main(group: penstock.LocalGroup) -> Counting:
        (stage,) = make_stages(group, [nn.Linear(WIDTH, WIDTH)], [0])
        return Counting(stage, 2, loss_fn=mean_square)

    (pipeline,) = penstock.local_ranks(1, main)
    pipeline.count += 1
    pipeline.early += 1
    with pytest.raises(AssignmentError, match="cannot be changed"):
        pipeline.num_microbatches = 3


def test_loss_can_not_be_taken_away_or_added_later() -> None:
    (pipeline,) = penstock.local_ranks(1, on_one_rank)
    with pytest.raises(StageError, match="made with a loss_fn and would now have none"):
        pipeline.loss_fn = None

    def without(group: penstock.LocalGroup) -> Pipeline:
        (stage,) = make_stages(group, [nn.Linear(WIDTH, WIDTH)], [0])
        return Pipeline(stage, "1F1B", num_microbatches=2)

    (pipeline,) = penstock.local_ranks(1, without)
    with pytest.raises(StageError, match="made with no loss_fn and would now have one"):
        pipeline.loss_fn = mean_square


def test_module_that_lacks_a_tied_parameter_is_refused() -> None:
    def main(group: penstock.LocalGroup) -> PipelineStage:
        module = nn.Linear(WIDTH, WIDTH)
        return PipelineStage(module, 0, 1, "cpu", group=group, tied={"weight": "shared"})

    (stage,) = penstock.local_ranks(1, main)
    with pytest.raises(StageError, match="tied names 'weight', which is not a parameter"):
        stage.submod = nn.Identity()


def test_copy_of_a_stage_works_on_its_own_module() -> None:
    """The engine of a copy once ran the layers of the original."""
    batch = mlp_batch()

    def main(group: penstock.LocalGroup) -> tuple[PipelineStage, PipelineStage]:
        (stage,) = make_stages(group, mlp(1), [0])
        pipeline = compat.ScheduleZBH1(stage, 4, loss_fn=mean_square)
        pipeline.step(*batch.args, target=batch.target)
        twin = copy.deepcopy(stage)
        twin.submod.zero_grad()
        compat.ScheduleZBH1(twin, 4, loss_fn=mean_square).step(*batch.args, target=batch.target)
        return stage, twin

    ((stage, twin),) = penstock.local_ranks(1, main)
    assert twin.submod is not stage.submod
    for (name, param), other in zip(
        stage.submod.named_parameters(), twin.submod.parameters(), strict=True
    ):
        assert torch.equal(param.grad, other.grad), name


def test_class_whose_forward_is_replaced_is_noticed() -> None:
    class Layer(nn.Linear):
        pass

    batch, modules = mlp_batch(), [Layer(WIDTH, WIDTH).double() for _ in range(4)]

    def main(pipeline: Pipeline) -> tuple[Any, list[Tensor]]:
        pipeline.step(*batch.args, target=batch.target)
        Layer.forward = lambda layer, x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
        for stage in pipeline.stages.values():
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        return pipeline.step(*batch.args, target=batch.target, losses=losses), losses

    results = run_locally(modules, FOUR_STAGES["ZB-V"], main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(step_unsplit(modules, batch), StepRecord(outputs, losses, grads_of(modules)))
