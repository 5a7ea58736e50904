"""What recomputation costs and saves: measured, planned with, and found again in real steps."""

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from local_steps import mean_square
from penstock import (
    Auto,
    CostTable,
    LocalGroup,
    Pipeline,
    Placement,
    Recording,
    Schedule,
    simulate,
)
from penstock.draw.panel import Panel
from penstock.draw.perfetto import trace
from penstock.ir import Recompute
from penstock.passes import add_recompute
from penstock.schedules import get
from recomputed_steps import assert_same_bits, moved_forward
from stage_training import make_stages
from staged_models import named_grads

ROWS, WIDTH, NUM_MICROBATCHES = 16, 32, 8
INPUT_BYTES = ROWS * WIDTH * 8
LINE, V = Placement.linear(2), Placement.v(2)


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


def on_two_ranks(main: Any, placement: Placement = LINE) -> list[Any]:
    """Return what each rank's stages give; a stage by itself if there is one per rank."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [Wide().double() for _ in range(placement.num_stages)]

    def on_rank(group: LocalGroup) -> Any:
        own = copy.deepcopy(modules)
        stages = make_stages(group, own, placement.stages_of(group.rank))
        return main(stages if len(stages) > 1 else stages[0])

    return penstock.local_ranks(2, on_rank)


@cache
def measured(*, recompute: bool, placement: Placement = LINE) -> CostTable:
    x, target = batch()

    def main(stages: Any) -> CostTable:
        return penstock.measure_costs(
            stages, NUM_MICROBATCHES, mean_square, x, target=target, repeats=1, recompute=recompute
        )

    first, other = on_two_ranks(main, placement)
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
    assert (0, 0) == costs.after_dropping
    assert costs.during_forward == costs.during_dropping == costs.during_recompute


def record(schedule: Schedule) -> Recording:
    x, target = batch()

    def main(stages: Any) -> Recording:
        pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
        pipeline.step(x, target=target, return_outputs=False)  # It makes the weights' gradients.
        with penstock.record(memory=True) as run:
            for _ in range(2):
                pipeline.step(x, target=target, return_outputs=False)
        return run.recording

    found: Recording = on_two_ranks(main, schedule.placement)[0]
    return found


@pytest.mark.parametrize("kind", ["all", "half"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
def test_measured_peak_is_the_simulated_one(name: str, kind: str) -> None:
    kept = get(name)(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    schedule = add_recompute(kept, lambda stage, mb: kind == "all" or mb % 2 == 0)
    recording = record(schedule)
    assert schedule == recording.schedule
    costs = measured(recompute=True)
    simulated = simulate(schedule, costs)
    peaks = recording.typical().measured_peaks
    assert [rank.peak_memory for rank in simulated.ranks] == list(peaks)
    if kind == "all":
        num_saved = (7 if name == "GPipe" else 1) if name != "ZB-H1" else 0
        saved = record(kept).typical().measured_peaks[0] - peaks[0]
        assert saved >= 0.9 * num_saved * costs.after_forward[0]


@pytest.mark.parametrize("kind", ["right before", "early"])
@pytest.mark.parametrize("stages", [(1,), (2,), (1, 2), (0, 1, 2, 3)])
def test_what_stages_of_a_rank_hand_over_counts_once(stages: tuple[int, ...], kind: str) -> None:
    """It did not count if only its maker was recomputed, and twice if only its taker was."""
    kept = get("V-Half")(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    schedule = add_recompute(kept, lambda stage, mb: stage in stages)
    costs = measured(recompute=True, placement=V)
    if kind == "early":
        for _ in range(3):
            schedule = moved_forward(schedule)
    peaks = record(schedule).typical().measured_peaks
    expected = [rank.peak_memory for rank in simulate(schedule, costs).ranks]
    if kind == "early":
        assert all(peak <= most for peak, most in zip(peaks, expected, strict=True))
    else:
        assert expected == list(peaks)


def test_recorded_recomputation_is_in_costs_and_traces() -> None:
    """Those of what never ran follow from what did: no forward kept its values, none was split."""
    schedule = add_recompute(get("1F1B")(num_ranks=2, num_microbatches=NUM_MICROBATCHES))
    recording = record(schedule)
    costs = recording.costs()
    assert 0 < min(costs.recompute)
    assert costs.after_dropping[1] < costs.after_forward[1] / 5
    assert costs.during_backward == costs.during_input == costs.during_weight
    for forward, dropped, again in zip(
        costs.during_forward, costs.after_dropping, costs.during_recompute, strict=True
    ):
        assert dropped + again == forward > 0
    assert schedule == recording.simulated().timeline.schedule
    events = json.loads(trace([Panel.of_recording("run", recording)]))["traceEvents"]
    again = [event for event in events if event["ph"] == "X" and event["name"].startswith("R")]
    # The recorded ones, and the simulated ones beneath.
    assert 2 * 2 * NUM_MICROBATCHES == len(again)
    places = {(event["args"]["stage"], event["name"], event["args"]["kind"]) for event in again}
    assert places == {
        (stage, f"R{mb}", "recomputation") for stage in (0, 1) for mb in range(NUM_MICROBATCHES)
    }


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


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.filterwarnings("ignore:.*was compiled by torch.compile, whose backward cannot be")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_stage_holds_the_layers_that_are_not_recomputed(is_compiled: bool) -> None:
    """Each of four equal layers keeps about a quarter; a level is a number of recomputed ones."""
    x, target = batch()

    def main(group: LocalGroup) -> dict[Any, CostTable]:
        def make(level: int) -> penstock.PipelineStage:
            torch.manual_seed(0)
            layers = nn.Sequential(*(Wide().double() for _ in range(4)))
            for layer in layers if is_compiled else ():
                layer.compile(backend="aot_eager")
            names = [str(number) for number in range(level)]
            (stage,) = make_stages(group, [layers] * 2, [group.rank], recomputed=names)
            return stage

        return penstock.measure_memory_levels(
            make, [1, 2, 4], 4, mean_square, x, target=target, repeats=1, recompute=True
        )

    tables = penstock.local_ranks(2, main)[0]
    for level, costs in tables.items():
        for kept, dropped in zip(costs.after_forward, costs.after_dropping, strict=True):
            assert kept * (1 - level / 4) == pytest.approx(dropped, abs=6 * 2 * INPUT_BYTES)
        for again, kept, dropped in zip(
            costs.during_recompute, costs.after_forward, costs.after_dropping, strict=True
        ):
            assert kept - dropped <= again <= kept - dropped + 4 * INPUT_BYTES
