"""Balanced cuts of a model with a large head, as it was measured on 8 GPUs.

Others cut it by hand (`tests/data/measured_gpu_runs.csv`). The costs of layers are worked out of
the even cut; ours must be as fast as theirs, simulated.
"""

from pathlib import Path

import pytest

from gpu_runs import Run, read_runs, simulate_cut, simulate_stages
from penstock import Placement, schedules
from penstock.partition import Partition, balance

README = Path(__file__).parents[2] / "benchmarks" / "balance" / "README.md"
RUNS = read_runs()
PAIRS = list(zip(RUNS[::2], RUNS[1::2], strict=True))
IDS = [f"{even.seq}-{even.vocab}" for even, _ in PAIRS]
SLACK = 0.05  # As of `penstock.Balanced`.
TWO_PER_RANK = ("Interleaved1F1B", "ZB-V")


def cut_for(name: str, run: Run) -> Partition:
    times = [sum(pair) for pair in zip(*run.layers(), strict=True)]
    placement = schedules.get(name)(num_ranks=8, num_microbatches=8).placement
    return balance(times, placement.num_stages, placement=placement, slack=SLACK)


def theirs(run: Run) -> Partition:
    return Partition(run.starts, (0.0,) * 34, Placement.linear(8))


def time_of(name: str, run: Run, cut: Partition) -> float:
    return simulate_cut(name, run, cut).makespan


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_layers_worked_out_of_a_run_give_its_stages_again(run: Run) -> None:
    """But for noise: stages with as many layers do not take exactly as long."""
    for times, layers in zip((run.forward, run.backward), run.layers(), strict=True):
        stages = Partition(run.starts, layers, Placement.linear(8)).stage_costs
        assert pytest.approx(stages, rel=0.04) == times
        assert times[-1] == pytest.approx(stages[-1])


@pytest.mark.parametrize(("even", "moved"), PAIRS, ids=IDS)
def test_balanced_cut_is_as_fast_as_the_authors(even: Run, moved: Run) -> None:
    """With the costs of either run; those of theirs with the times of its own stages too."""
    ours = cut_for("1F1B", even)
    for run in (even, moved):
        assert time_of("1F1B", run, ours) <= time_of("1F1B", run, theirs(moved)) * (1 + 1e-12)
    own = simulate_stages("1F1B", moved.num_microbatches, moved.forward, moved.backward)
    assert time_of("1F1B", moved, ours) <= own.makespan * (1 + 1e-12)


def test_v_is_faster_unless_the_head_alone_is_more_than_a_ranks_share() -> None:
    for even, moved in PAIRS:
        forward, backward = even.layers()
        head, share = forward[-1] + backward[-1], (sum(forward) + sum(backward)) / 8
        in_a_v = time_of("ZB-V", even, cut_for("ZB-V", even))
        linear = time_of("1F1B", even, cut_for("1F1B", even))
        assert (head < share) == (in_a_v < linear), even.name
        assert (in_a_v < linear) == (in_a_v < time_of("1F1B", even, theirs(moved)))


def counted(cut: Partition) -> str:
    """The layers of each stage, without the embedding in the first and the head in the last."""
    counts = [len(cut.layers_of(stage)) for stage in range(cut.num_stages)]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return "+".join(map(str, counts))


def make_table() -> str:
    names = ("1F1B", *TWO_PER_RANK)
    columns = [f"{name} | ÷ theirs" for name in names]
    rows = [
        f"| sequence | vocabulary | head | costs of | theirs | {' | '.join(columns)} |",
        "|--:|--:|--:|---|--:|" + "--:|" * 2 * len(names),
    ]
    for even, moved in PAIRS:
        forward, backward = even.layers()
        head = (forward[-1] + backward[-1]) / (forward[1] + backward[1])
        for run in (even, moved):
            is_even = run is even
            first = f"| {run.seq:,} | {run.vocab:,} | {head:.1f} " if is_even else "| | | "
            time = time_of("1F1B", even, theirs(moved))
            if not is_even:
                time = simulate_stages(
                    "1F1B", moved.num_microbatches, moved.forward, moved.backward
                ).makespan
            cells = [f"{time:,.0f} ms"]
            for name in names:
                ours = time_of(name, run, cut_for(name, even))
                cells += [f"{ours:,.0f} ms", f"{ours / time:.3f}"]
            rows.append(
                f"{first}| {'the even cut' if is_even else 'theirs'} | {' | '.join(cells)} |"
            )
    return "\n".join(rows)


def test_table_in_the_readme_is_made_by_the_simulator() -> None:
    text = README.read_text()
    assert make_table() in text
    for even, moved in PAIRS:
        cuts = [counted(theirs(moved)), counted(cut_for("1F1B", even))]
        cuts.append(counted(cut_for("ZB-V", even)))
        assert f"| {even.seq:,} | {even.vocab:,} | {' | '.join(cuts)} |" in text
