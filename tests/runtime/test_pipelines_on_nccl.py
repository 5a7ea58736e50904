"""Pipelines over an imitation of NCCL: whatever uses channels opens them, and no rank blocks."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from imitated_nccl import ImitatedComm, Pairs, imitate_nccl
from local_steps import mean_square, mlp, mlp_batch
from penstock import LocalGroup, Pipeline, local_ranks, schedules
from penstock.comm.channels import both_ways
from penstock.comm.links import PairLink
from penstock.errors import CommError
from penstock.ir import Placement
from penstock.ir.message import Channel
from penstock.runtime.auto.auto_value import Auto
from skip_models import Skip, SkipRun, assert_skips_like_unsplit, train_skips
from stage_training import SOME_NAMES, Run, assert_like_unsplit, make_stages, train
from tied_models import TiedRun, assert_trains_as_unsplit, train_tied

NUM_RANKS = 4
CHAIN = both_ways([(0, 1), (1, 2), (2, 3)])
STAR = both_ways([(0, 1), (0, 2), (0, 3)])


def run(num_ranks: int, main: Callable[..., Any], *args: Any) -> tuple[list[Any], set[Channel]]:
    """Call `main` on all ranks; returns what they returned, and which channels were opened."""
    lines: defaultdict[int, Pairs] = defaultdict(dict)

    def on_rank(group: LocalGroup) -> Any:
        imitate_nccl(group, lines)
        return main(group, *args)

    results = local_ranks(num_ranks, on_rank)
    return results, {channel for pairs in lines.values() for channel in pairs}


def make_pipeline(group: LocalGroup, schedule: str = "1F1B", **options: Any) -> Pipeline:
    stages = make_stages(group, mlp(), [group.rank])
    return Pipeline(stages, schedule, num_microbatches=4, loss_fn=mean_square, **options)


def train_a_little(pipeline: Pipeline, num_steps: int = 1) -> None:
    batch = mlp_batch()
    for _ in range(num_steps):
        pipeline.step(*batch.args, target=batch.target)


@pytest.mark.parametrize("schedule", SOME_NAMES)
def test_schedules_train(schedule: str) -> None:
    settings = Run("mlp", schedule, 3, evaluates=True, num_steps=2)
    results, _ = run(3, train, settings)
    assert_like_unsplit(settings, results)


class Counting(nn.Module):
    """Hands on a buffer that its next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.layer(x), self.count


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.came: list[float] = []

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        self.came.append(count.item())
        return x


def test_buffer_that_changes_while_it_is_under_way_arrives_as_it_was() -> None:
    """NCCL reads it some time after the send; other links have copied it by then."""
    modules = [Counting(), Noting()]

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [group.rank])
        pipeline = Pipeline(stages, "GPipe", num_microbatches=4, loss_fn=mean_square)
        for _ in range(2):
            pipeline.step(torch.ones(4, 2), target=torch.ones(4, 2))

    run(2, main)
    assert [1.0, 2, 3, 4, 5, 6, 7, 8] == modules[1].came


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["fixed", "dynamic"])
def test_skips_have_channels_of_their_own(is_dynamic: bool) -> None:
    schedule = schedules.get("1F1B")(num_ranks=NUM_RANKS, num_microbatches=4)
    settings = SkipRun(schedule, (Skip(0, 2), Skip(1, 3)), is_dynamic=is_dynamic)
    results, opened = run(NUM_RANKS, train_skips, settings)
    assert_skips_like_unsplit(settings, results)
    assert CHAIN | both_ways([(0, 2), (1, 3)]) == opened


def test_tied_parameters_have_channels_of_their_own() -> None:
    """The embedding is on ranks 0 and 3, the mixture on 0, 2 and 3."""
    settings = TiedRun("1F1B", NUM_RANKS)
    results, opened = run(NUM_RANKS, train_tied, settings)
    assert_trains_as_unsplit(settings, results)
    assert CHAIN | both_ways([(0, 2), (0, 3), (2, 3)]) == opened


def test_ties_that_connect_at_their_first_message_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank that holds a copy sends first, and would wait for the other to receive."""

    def make_group(self: PairLink, channel: Channel, timeout_s: float) -> None:
        self._groups[channel] = self._make_pair(channel)

    monkeypatch.setattr(PairLink, "connect", make_group)
    with pytest.raises(
        CommError, match="no rank can go on: rank 0 waits for a first use of 0 to 2"
    ):
        run(NUM_RANKS, train_tied, TiedRun("1F1B", NUM_RANKS))


def test_recording_opens_channels_to_rank_0_when_it_is_asked_for() -> None:
    def main(group: LocalGroup) -> tuple[Any, list[int]]:
        made = imitate_nccl(group, lines)
        pipeline = make_pipeline(group, record=True)
        train_a_little(pipeline, 2)
        counts = [len(made[0].ends)]
        recordings = [pipeline.recording(), pipeline.recording()]
        return recordings, [*counts, len(made[0].ends)]

    lines: defaultdict[int, Pairs] = defaultdict(dict)
    results = local_ranks(NUM_RANKS, main)
    assert [[2, 6], [4, 4], [4, 6], [2, 4]] == [counts for _, counts in results]
    assert all(2 == len(recording.steps) for recording in results[0][0])


def test_schedule_that_is_found_needs_rank_0_too() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = make_pipeline(group, Auto(seconds=0.1, replan_when=1e-9))
        pipeline._runner._pilot._look_every = 1  # type: ignore[union-attr]  # So that it plans again.
        train_a_little(pipeline, 15)

    _, opened = run(NUM_RANKS, main)
    assert CHAIN | STAR == opened


def test_costs_are_measured_on_all_edges() -> None:
    placement = Placement((0, 1, 2, 2, 1, 0))

    def main(group: LocalGroup) -> Any:
        stages = make_stages(group, mlp(6), placement.stages_of(group.rank))
        batch = mlp_batch()
        return penstock.measure_costs(
            stages, 4, mean_square, *batch.args, target=batch.target, repeats=1
        )

    tables, opened = run(3, main)
    assert [tables[0]] * 3 == tables
    assert both_ways([(0, 1), (1, 2), (0, 2)]) == opened


def test_pipeline_without_backward_has_no_way_back() -> None:
    def main(group: LocalGroup) -> None:
        make_pipeline(group, "ForwardOnly").eval(*mlp_batch().args)

    _, opened = run(NUM_RANKS, main)
    assert {Channel(0, 1), Channel(1, 2), Channel(2, 3)} == opened


def test_close_ends_all_communicators() -> None:
    def main(group: LocalGroup) -> list[bool]:
        made: list[ImitatedComm] = imitate_nccl(group, lines)
        pipeline = make_pipeline(group)
        train_a_little(pipeline)
        pipeline.close()
        return [end.is_aborted for end in made[0].ends.values()]

    lines: defaultdict[int, Pairs] = defaultdict(dict)
    assert [[True] * count for count in (2, 4, 4, 2)] == local_ranks(NUM_RANKS, main)
