"""Parts that users bring: schedules, placements, functions, weight backwards, callbacks."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuzzing import IS_LONG, rotated
from local_steps import (
    FOUR_STAGES,
    NUM_STAGES,
    WIDTH,
    assert_same,
    grads_of,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
    step_unsplit,
    zero_grad,
)
from penstock import (
    LocalGroup,
    Pipeline,
    PipelineStage,
    Placement,
    Schedule,
    local_ranks,
    schedules,
)
from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward, Overlap
from penstock.ir.action import compute_parts
from penstock.passes import add_comms
from penstock.runtime import ActionContext
from stage_training import CPU, SOME_NAMES, TRAINING_NAMES, assert_same_grads
from staged_models import named_grads

every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)


def check(schedule: Schedule) -> None:
    modules, batch = mlp(schedule.num_stages), mlp_batch(2 * schedule.num_microbatches)
    expected = step_unsplit(modules, batch)
    for _ in range(2):
        assert_same(expected, step_locally(modules, schedule, batch))


def random_schedule(seed: int) -> Schedule:
    """Any placement, and any order in which the ranks could run; some backwards are split."""
    random = Random(seed)
    num_ranks = random.randint(1, 4)
    extra = random.choices(range(num_ranks), k=random.randint(0, 4))
    ranks = random.sample([*range(num_ranks), *extra], num_ranks + len(extra))
    placement, m = Placement(ranks), random.randint(1, 5)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    # What each microbatch has to do next is last; a weight half is a list of its own.
    left: list[list[Action]] = []
    for mb in range(m):
        kind = random.choice([Backward, BackwardInput])
        backwards: list[Action] = [kind(stage, mb) for stage in range(len(ranks))]
        left.append(backwards + [Forward(stage, mb) for stage in reversed(range(len(ranks)))])
    while any(left):
        action = random.choice([chain for chain in left if chain]).pop()
        orders[ranks[action.stage]].append(action)  # type: ignore[union-attr]
        if isinstance(action, BackwardInput):
            left.append([BackwardWeight(action.stage, action.mb)])
    return Schedule(orders, placement, m)


@rotated(num_cases=12, seed=range(40) if IS_LONG else range(12), has_comms=[False, True])
def test_random_schedule_trains_as_unsplit(seed: int, has_comms: bool) -> None:
    schedule = random_schedule(seed)
    check(add_comms(schedule) if has_comms else schedule)


@pytest.mark.parametrize("ranks", [[0, 1, 1, 0], [1, 0], [1, 0, 0, 1], [0, 0, 1], [2, 0, 1, 0]])
def test_placement_of_ones_own(ranks: list[int]) -> None:
    placement, m = Placement(ranks), 3
    orders = [
        [Forward(stage, mb) for mb in range(m) for stage in held]
        + [Backward(stage, mb) for mb in range(m) for stage in reversed(held)]
        for held in map(placement.stages_of, range(placement.num_ranks))
    ]
    check(Schedule(orders, placement, m))


EXPLICIT = """\
0F0,0SEND_F0,0F1,0F2,0SEND_F1,0SEND_F2,0RECV_B0,0RECV_B1,0I0,0I1,0W1,0RECV_B2,0W0,0B2
1RECV_F0,1RECV_F1,1RECV_F2,1F1,1I1,1F0,1I0,1SEND_B0,1SEND_B1,1W0,1F2,1B2,1W1,1SEND_B2
"""


def test_schedule_from_text_with_sends_and_receives_of_its_own() -> None:
    """Sent late, received early, and not in the order in which it is used."""
    schedule = Schedule.from_csv(EXPLICIT)
    assert schedule.has_comms
    check(schedule)


@pytest.mark.parametrize("name", SOME_NAMES)
def test_schedule_that_went_through_text(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    check(Schedule.from_csv(add_comms(schedule).to_csv()))


@rotated(
    name=[name for name in TRAINING_NAMES if schedules.get(name).takes_any_stages_per_rank],
    stages_per_rank=[3, 1],
)
def test_other_numbers_of_stages_per_rank(name: str, stages_per_rank: int) -> None:
    make = schedules.get(name)
    check(make(num_ranks=2, num_microbatches=3, stages_per_rank=stages_per_rank))


@rotated(name=TRAINING_NAMES, num_microbatches=[1, 7, 2])
def test_few_microbatches_and_numbers_that_ranks_do_not_divide(
    name: str, num_microbatches: int
) -> None:
    make = schedules.get(name)
    num_microbatches = max(num_microbatches, make.min_microbatches(schedules.Shape(3, 1, 1)))
    check(make(num_ranks=3, num_microbatches=num_microbatches))


@every_schedule
def test_custom_functions_run_each_action_of_their_kind_once(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()
    calls: Counter[Action] = Counter()

    def run_it(action: Any, context: ActionContext) -> None:
        calls[action] += 1
        assert action.stage in context.stages
        assert 4 == len(context.batch.args)
        context.run(action)

    def run_halves(action: Overlap, context: ActionContext) -> None:
        calls[action] += 1
        context.run(action.backward)  # The other way round; nothing says which comes first.
        context.run(action.forward)

    def main(pipeline: Pipeline) -> None:
        for kind in (Forward, Backward, BackwardInput, BackwardWeight):
            pipeline.register_custom_function(kind, run_it)
        pipeline.register_custom_function(Overlap, run_halves)
        pipeline.step(*batch.args, target=batch.target)

    run_locally(modules, schedule, main)
    assert_same_grads("step", step_unsplit(modules, batch).grads, [grads_of(modules)])
    assert Counter(action for order in schedule.orders for action in order) == calls


def test_custom_function_for_overlaps_may_run_the_whole_of_it() -> None:
    modules, batch = mlp(), mlp_batch()

    def main(pipeline: Pipeline) -> None:
        pipeline.register_custom_function(Overlap, lambda action, context: context.run(action))
        pipeline.step(*batch.args, target=batch.target)

    run_locally(modules, FOUR_STAGES["DualPipeV"], main)
    assert_same_grads("step", step_unsplit(modules, batch).grads, [grads_of(modules)])


@every_schedule
def test_custom_functions_are_called_in_eval_too(schedule: Schedule) -> None:
    modules, batch = mlp(), mlp_batch()
    calls: Counter[Action] = Counter()

    def run_it(action: Forward, context: ActionContext) -> None:
        calls[action] += 1
        context.run(action)

    def main(pipeline: Pipeline) -> None:
        pipeline.register_custom_function(Forward, run_it)
        pipeline.eval(*batch.args, target=batch.target)

    run_locally(modules, schedule, main)
    expected = {Forward(stage, mb): 1 for stage in range(NUM_STAGES) for mb in range(4)}
    assert expected == calls


@pytest.mark.parametrize("name", TRAINING_NAMES)
def test_callback_comes_once_per_stage_and_step_when_gradients_are_final(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = mlp(schedule.num_stages)
    batch = mlp_batch()

    def main(pipeline: Pipeline) -> None:
        for step in range(2):
            pipeline.step(*batch.args, target=batch.target)
            finals[step].update(
                {s: named_grads({s: stage.submod}) for s, stage in pipeline.stages.items()}
            )

    def on_grads_ready(stage: PipelineStage) -> None:
        seen.append((stage.stage_index, named_grads({stage.stage_index: stage.submod})))

    seen: list[tuple[int, dict[str, Tensor | None]]] = []
    finals: list[dict[int, dict[str, Tensor | None]]] = [{}, {}]
    run_locally(modules, schedule, main, on_grads_ready=on_grads_ready)
    assert Counter({s: 2 for s in range(schedule.num_stages)}) == Counter(s for s, _ in seen)
    count: Counter[int] = Counter()
    for stage, grads in seen:
        final = finals[count[stage]][stage]
        count[stage] += 1
        assert final.keys() == grads.keys()
        assert all(torch.equal(final[key], grads[key]) for key in final)  # type: ignore[arg-type]


def test_callback_does_not_come_in_eval() -> None:
    modules, batch, seen = mlp(), mlp_batch(), []

    def main(pipeline: Pipeline) -> None:
        pipeline.eval(*batch.args, target=batch.target)

    run_locally(modules, FOUR_STAGES["ZB-V"], main, on_grads_ready=seen.append)
    assert [] == seen


class _Product(torch.autograd.Function):
    """A product that leaves its weight gradient to others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "OwnWeightBackward") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.layer.arrived.append((x, grad))
        return grad @ weight.t(), None, None


class OwnWeightBackward(nn.Module):
    """Computes its weight gradients by itself, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(WIDTH, WIDTH))
        self.arrived: list[tuple[Tensor, Tensor]] = []
        self.num_run = 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.weight, self)
        return torch.tanh(y)

    def build(self) -> Callable[[], None]:
        """What the stage is given as its `dw_builder`."""
        arrived, self.arrived = self.arrived, []

        def add_grads() -> None:
            self.num_run += 1
            for x, grad in arrived:
                new = x.t() @ grad
                self.weight.grad = new if self.weight.grad is None else self.weight.grad + new

        return add_grads


class PlainProduct(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@every_schedule
def test_weight_backward_of_the_users_own(schedule: Schedule) -> None:
    """Built after each backward of the stage, run where the schedule has the weight backward.

    Where the backward is split it was not built at all, and gradients were missing.
    """
    modules = [OwnWeightBackward() for _ in range(NUM_STAGES)]
    batch = mlp_batch()
    runs_at: Counter[str] = Counter()

    def note(action: BackwardWeight, context: ActionContext) -> None:
        before = modules[action.stage].num_run
        context.run(action)
        runs_at["in W"] += modules[action.stage].num_run - before

    def main(group: LocalGroup) -> None:
        stages = [
            PipelineStage(modules[s], s, NUM_STAGES, CPU, group=group, dw_builder=modules[s].build)
            for s in schedule.placement.stages_of(group.rank)
        ]
        pipeline = Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
        pipeline.register_custom_function(BackwardWeight, note)
        for _ in range(2):
            zero_grad([stage.submod for stage in stages])
            pipeline.step(*batch.args, target=batch.target)

    local_ranks(schedule.num_ranks, main)
    expected = step_unsplit([PlainProduct(module.weight) for module in modules], batch)
    assert_same_grads("step", expected.grads, [grads_of(modules)])
    assert 2 * 4 * NUM_STAGES == sum(module.num_run for module in modules)
    actions = [part for order in schedule.orders for a in order for part in compute_parts(a)]
    assert 2 * sum(isinstance(part, BackwardWeight) for part in actions) == runs_at["in W"]
