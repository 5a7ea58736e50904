"""What recomputation costs and saves: measured, planned with, and found again in real steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from local_steps import mean_square
from penstock import Auto, CostTable, LocalGroup, Pipeline, Recording, Schedule, simulate
from penstock.ir import Recompute
from penstock.passes import add_recompute
from penstock.schedules import get
from recomputed_steps import assert_same_bits
from stage_training import make_stages
from staged_models import named_grads

ROWS, WIDTH, NUM_MICROBATCHES = 16, 32, 8
INPUT_BYTES = ROWS * WIDTH * 8


class Wide(nn.Module):
    """It keeps much more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + y


def batch() -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, target = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    return x, target


def on_two_ranks(main: Any) -> list[Any]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Wide().double(), Wide().double()]

    def on_rank(group: LocalGroup) -> Any:
        own = copy.deepcopy(modules[group.rank])
        (stage,) = make_stages(group, [own] * 2, [group.rank])
        return main(stage)

    return penstock.local_ranks(2, on_rank)


def measured(*, recompute: bool) -> CostTable:
    x, target = batch()

    def main(stage: penstock.PipelineStage) -> CostTable:
        return penstock.measure_costs(
            stage, NUM_MICROBATCHES, mean_square, x, target=target, repeats=1, recompute=recompute
        )

    first, other = on_two_ranks(main)
    assert first == other
    return first


def test_recomputation_is_measured_if_asked_for() -> None:
    costs = measured(recompute=True)
    assert (0, INPUT_BYTES) == costs.after_dropping, "the first stage's input is the caller's"
    assert min(costs.after_forward) > 10 * INPUT_BYTES
    assert costs.recompute != costs.forward
    assert min(costs.recompute) > 0
    assert costs == CostTable.from_json(costs.to_json())
    for dropping, forward in zip(costs.during_dropping, costs.during_forward, strict=True):
        assert 0 < dropping < forward
    for again, kept, dropped in zip(
        costs.during_recompute, costs.after_forward, costs.after_dropping, strict=True
    ):
        assert kept - dropped <= again <= 2 * kept


def test_recomputation_is_not_measured_unless_asked_for() -> None:
    costs = measured(recompute=False)
    assert costs.forward == costs.recompute
    assert (0, 0) == costs.after_dropping == costs.during_dropping == costs.during_recompute


def record(schedule: Schedule) -> Recording:
    x, target = batch()

    def main(stage: penstock.PipelineStage) -> Recording:
        pipeline = Pipeline(stage, schedule, loss_fn=mean_square)
        pipeline.step(x, target=target, return_outputs=False)  # It makes the weights' gradients.
        with penstock.record(memory=True) as run:
            for _ in range(2):
                pipeline.step(x, target=target, return_outputs=False)
        return run.recording

    found: Recording = on_two_ranks(main)[0]
    return found


@pytest.mark.parametrize("kind", ["all", "half"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_measured_peak_is_the_simulated_one(name: str, kind: str) -> None:
    """But for outputs that are under way, and what is held of a loss."""
    kept = get(name)(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    schedule = add_recompute(kept, lambda stage, mb: kind == "all" or mb % 2 == 0)
    recording = record(schedule)
    assert schedule == recording.schedule
    costs = measured(recompute=True)
    simulated = simulate(schedule, costs)
    peaks = recording.typical().measured_peaks
    for rank, peak in enumerate(peaks):
        assert simulated.ranks[rank].peak_memory == pytest.approx(peak, abs=3 * INPUT_BYTES)
    if kind == "all":
        num_saved = (7 if name == "GPipe" else 1) if name != "ZB-H1" else 0
        saved = record(kept).typical().measured_peaks[0] - peaks[0]
        assert saved >= 0.9 * num_saved * costs.after_forward[0]


def test_recorded_recomputation_is_in_costs_and_traces() -> None:
    schedule = add_recompute(get("1F1B")(num_ranks=2, num_microbatches=NUM_MICROBATCHES))
    costs = record(schedule).costs()
    assert 0 < min(costs.recompute)
    assert costs.after_dropping[1] < costs.after_forward[1] / 5


def test_auto_recomputes_to_fit_and_trains_the_same() -> None:
    """The cap is less than what one microbatch of any other schedule and its backward need."""
    x, target = batch()
    plain = measured(recompute=True)
    cap = (
        1.05
        * simulate(
            add_recompute(get("1F1B")(num_ranks=2, num_microbatches=NUM_MICROBATCHES)), plain
        ).peak_memory
    )

    def main(stage: penstock.PipelineStage, schedule: Any, num_steps: int) -> Any:
        pipeline = Pipeline(stage, schedule, num_microbatches=NUM_MICROBATCHES, loss_fn=mean_square)
        for _ in range(num_steps):
            stage.submod.zero_grad()
            pipeline.step(x, target=target)
        return pipeline.schedule, named_grads({stage.stage_index: stage.submod})

    options = Auto(memory=cap, recompute=True, seconds=2.0)
    found = on_two_ranks(lambda stage: main(stage, options, 6))
    schedule = found[0][0]
    has_again = any(isinstance(action, Recompute) for order in schedule.orders for action in order)
    schedule.verify()
    expected = on_two_ranks(
        lambda stage: main(stage, penstock.passes.remove_recompute(schedule), 1)
    )
    assert has_again
    assert_same_bits([grads for _, grads in expected], [grads for _, grads in found])


def test_memory_levels_have_the_costs_of_recomputation() -> None:
    x, target = batch()

    def main(stage: penstock.PipelineStage) -> dict[Any, CostTable]:
        return penstock.measure_memory_levels(
            lambda level: stage,
            ["only"],
            NUM_MICROBATCHES,
            mean_square,
            x,
            target=target,
            repeats=1,
            recompute=True,
        )

    assert INPUT_BYTES == on_two_ranks(main)[0]["only"].after_dropping[1]
