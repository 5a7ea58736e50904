"""The simulated time of a step is the one that was measured on GPUs, within 2 %."""

from pathlib import Path

import pytest

from gpu_runs import Run, read_runs, simulate_stages

RUNS = read_runs()
PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
LAYERS = {"base": "even", "redis": "moved"}


def simulated_ms(run: Run) -> float:
    return simulate_stages("1F1B", run.num_microbatches, run.forward, run.backward).makespan


def test_table_has_all_eight_runs() -> None:
    assert 8 == len({run.name for run in RUNS})


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_simulated_step_is_the_measured_one_within_two_percent(run: Run) -> None:
    assert run.iteration == pytest.approx(simulated_ms(run), rel=0.02)


def test_table_in_the_docs_is_made_by_the_simulator() -> None:
    rows = [
        "| sequence | vocabulary | layers | measured | simulated | ÷ measured |",
        "|--:|--:|---|--:|--:|--:|",
    ]
    for run in RUNS:
        time = simulated_ms(run)
        rows.append(
            f"| {run.seq:,} | {run.vocab:,} | {LAYERS[run.kind]} | {run.iteration:,.1f} ms "
            f"| {time:,.1f} ms | {time / run.iteration:.3f} |"
        )
    assert "\n".join(rows) in PAGE.read_text()
