"""Steps that run their microbatches in an order by their work give what the given order gives."""

import copy
import re
import time
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from local_steps import (
    FOUR_STAGES,
    NUM_MICROBATCHES,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
)
from penstock import Pipeline, Placement
from penstock.errors import PipelineError
from penstock.runtime.microbatch_order import order_by_work
from stage_training import assert_same_grads
from staged_models import Batch

WORK = [3.0, 1.0, 4.0, 2.0]


def test_shortest_run_first_and_last_and_the_longest_in_the_middle() -> None:
    work = [Random(0).random() for _ in range(9)]
    for placement in (Placement.linear(3), Placement.v(3)):
        ran = [work[mb] for mb in order_by_work(work, placement)]
        top = ran.index(max(ran))
        assert sorted(ran[:top]) == ran[:top]
        assert sorted(ran[top:], reverse=True) == ran[top:]
        assert sorted(ran)[:2] == [ran[0], ran[-1]]
    loop = order_by_work(work, Placement.loop(3, stages_per_rank=2))
    assert sorted(work) == [work[mb] for mb in loop]


def test_microbatches_of_equal_work_have_the_same_order_everywhere() -> None:
    assert [0, 2, 3, 1] == order_by_work([1.0] * 4, Placement.linear(2))


def test_order_of_128_microbatches_takes_less_than_a_millisecond() -> None:
    work = [Random(0).random() for _ in range(128)]
    took = []
    for _ in range(20):
        start = time.perf_counter()
        order_by_work(work, Placement.v(16))
        took.append(time.perf_counter() - start)
    assert min(took) < 1e-3


@pytest.mark.parametrize("name", FOUR_STAGES)
def test_losses_outputs_and_gradients_are_those_of_the_given_order(name: str) -> None:
    modules, batch = mlp(), mlp_batch()
    ordered = Batch(batch.args, {"work": WORK}, batch.target)
    expected = step_locally(modules, FOUR_STAGES[name], batch)
    actual = step_locally(modules, FOUR_STAGES[name], ordered, by_work=True)
    assert torch.equal(expected.outputs, actual.outputs)
    assert torch.equal(torch.stack(expected.losses), torch.stack(actual.losses))
    assert_same_grads("step", expected.grads, [actual.grads])


def test_microbatches_of_different_lengths_run_by_work() -> None:
    """Each has its own target and weight, and losses come back as the microbatches were given."""
    lengths = [3, 1, 5, 2]
    modules = mlp()
    args = [(randn(length, 6),) for length in lengths]
    targets = [randn(length, 6) for length in lengths]
    whole = copy.deepcopy(nn.Sequential(*modules))
    ran: list[int] = []
    modules[0].register_forward_pre_hook(lambda module, given: ran.append(len(given[0])))

    def main(pipeline: Pipeline) -> Any:
        losses: list[Tensor] = []
        outputs = pipeline.step_microbatches(
            args, targets=targets, losses=losses, weights=[3, 1, 5, 2], work=lengths
        )
        return outputs, losses

    outputs, losses = run_locally(
        modules, FOUR_STAGES["1F1B"], main, by_work=True, stage_options={"dynamic_shapes": True}
    )[-1]
    assert [1, 3, 5, 2] == ran
    expected = [whole(*given) for given in args]
    for one, other in zip(expected, outputs, strict=True):
        assert torch.equal(one, other)
    weighed = [
        mean_square(output, target) * length * 4 / 11
        for output, target, length in zip(expected, targets, lengths, strict=True)
    ]
    torch.testing.assert_close(torch.stack(losses), torch.stack(weighed).detach())
    (sum(weighed) / 4).backward()
    for own, other in zip(
        (p for module in modules for p in module.parameters()), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, other.grad)


def step_with(work: Any, **options: Any) -> list[Any]:
    x, target = randn(8, 6), randn(8, 6)

    def main(pipeline: Pipeline) -> None:
        rank = min(pipeline.stages)
        given = work(rank) if callable(work) else work
        pipeline.step(x, target=target, work=given)

    return run_locally(mlp(), FOUR_STAGES["1F1B"], main, **options)


@pytest.mark.parametrize(
    ("work", "options", "message"),
    [
        (WORK, {}, "step() was given work, but the pipeline was made without by_work, so ranks"),
        (None, {"by_work": True}, "work is None. Expected a number for each of the 4 microbatches"),
        ("1234", {"by_work": True}, "work is '1234'. Expected a number for each of the 4"),
        ([1, 2], {"by_work": True}, "work has 2 values. Expected one for each of the 4"),
        ([1, 2, -1, 3], {"by_work": True}, "work[2] is -1. Expected a finite number that is not"),
        ([1, 2, 3, "4"], {"by_work": True}, "work[3] is '4'. Expected a finite number that is not"),
        ([10**400] * 4, {"by_work": True}, "Expected a finite number that is not negative."),
        (WORK, {"by_work": "no"}, "by_work is 'no'. Expected True or False."),
        (
            lambda rank: [1, 2, 3, 4 + (rank > 1)],
            {"by_work": True},
            "work is [1.0, 2.0, 3.0, 5.0] on rank 2, but [1.0, 2.0, 3.0, 4.0] on rank 1. Give all "
            "ranks the same.",
        ),
    ],
)
def test_work_that_cannot_be_meant_is_refused(work: Any, options: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        step_with(work, **options)


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple])
def test_work_may_be_a_tensor_or_an_array(make: Any) -> None:
    step_with(make(WORK), by_work=True)


def test_parallelized_model_takes_work() -> None:
    x, target = torch.randn(2, 8, 4).double()

    def main(group: penstock.LocalGroup, by_work: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        pipe = penstock.parallelize(
            model,
            x,
            loss_fn=nn.functional.mse_loss,
            num_microbatches=NUM_MICROBATCHES,
            by_work=by_work,
            group=group,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            work = WORK if by_work else None
            losses.append(float(pipe.step(x, target=target, work=work)))
            optimizer.step()
        return losses

    given, _ = penstock.local_ranks(2, main, False)
    one, other = penstock.local_ranks(2, main, True)
    assert one == other
    assert given[0] == one[0]
    assert given == pytest.approx(one, rel=1e-14)


@pytest.mark.parametrize("schedule", [penstock.Auto(seconds=1.0), "ZB-V"], ids=str)
def test_any_schedule_runs_by_work(schedule: str | penstock.Auto) -> None:
    x, target = randn(8, 6), randn(8, 6)

    def main(group: penstock.LocalGroup) -> None:
        model = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(4)))
        pipe = penstock.parallelize(
            model,
            x,
            loss_fn=mean_square,
            schedule=schedule,
            num_microbatches=4,
            by_work=True,
            group=group,
        )
        for number in range(4):
            pipe.step(x, target=target, work=WORK[number:] + WORK[:number])

    penstock.local_ranks(2, main)
