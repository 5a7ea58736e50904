"""The schedule that is found while training: right gradients in every step, and a better order."""

import copy
import logging
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from auto_training import AutoRun, assert_trained_alike, train_auto
from fuzzing import rotated
from local_steps import mean_square, mlp, mlp_batch, step_unsplit, zero_grad
from penstock import (
    CostTable,
    LocalGroup,
    Pipeline,
    Placement,
    Schedule,
    ScheduleAuto,
    local_ranks,
    schedules,
)
from penstock.comm.pipelines_together import Peers
from penstock.errors import AgreementError, CostError, StageError
from penstock.ir import Forward
from penstock.runtime.auto.auto_pilot import AutoPilot
from penstock.runtime.auto.auto_value import Auto
from penstock.solver import Problem
from skip_models import Skip, SkipStage
from stage_training import assert_same_grads, make_stages
from staged_models import named_grads

LINEAR = tuple(range(2))
# Linear, one rank alone, a loop, a V, and one that no algorithm is for.
PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 1, 1, 0), (1, 0)]


def run_locally(run: AutoRun) -> list[Any]:
    return local_ranks(max(run.placement) + 1, train_auto, run)


def make_auto(
    group: LocalGroup, modules: list[nn.Module], placement: Placement, **options: Any
) -> Pipeline:
    stages = make_stages(group, modules, placement.stages_of(group.rank))
    pipeline_options = {"num_microbatches": 4, "loss_fn": mean_square}
    for name in ("num_microbatches", "loss_fn"):
        if name in options:
            pipeline_options[name] = options.pop(name)
    return Pipeline(stages, Auto(**{"seconds": 5, **options}), **pipeline_options)


def step_on_two_ranks(num_steps: int = 1, **options: Any) -> None:
    modules, batch = mlp(2), mlp_batch()

    def main(group: LocalGroup) -> None:
        pipeline = make_auto(group, modules, Placement.linear(2), **options)
        for _ in range(num_steps):
            pipeline.step(*batch.args, target=batch.target)

    local_ranks(2, main)


@rotated(placement=PLACEMENTS, num_microbatches=[4, 3, 1])
def test_every_step_trains_as_the_unsplit_model(
    placement: tuple[int, ...], num_microbatches: int
) -> None:
    run = AutoRun("mlp", placement, num_microbatches)
    assert_trained_alike(run, run_locally(run))


@pytest.mark.parametrize("model", ["transformer", "conv", "many"])
def test_every_model_trains_over_the_change(model: str) -> None:
    run = AutoRun(model, (0, 1, 1, 0))
    ranks = run_locally(run)
    assert_trained_alike(run, ranks)
    assert ranks[0].schedules[-1] not in ranks[0].schedules[:2]


@pytest.mark.parametrize("measure_steps", [1, 2])
def test_schedule_changes_behind_the_steps_that_are_measured(measure_steps: int) -> None:
    run = AutoRun("mlp", (0, 1), num_steps=7, options={"measure_steps": measure_steps})
    found = run_locally(run)[0].schedules
    safe = schedules.get("1F1B")(num_ranks=2, num_microbatches=4)
    split, whole = penstock.passes.split_backward(safe).to_csv(), safe.to_csv()
    # What a step leaves is the schedule of the next: one to warm up, then those that are timed.
    expected = [split] * measure_steps + [whole] * measure_steps
    assert expected == found[: 2 * measure_steps]
    planned = Schedule.from_csv(found[-1])
    assert [found[-1]] * (7 - 2 * measure_steps) == found[2 * measure_steps :]
    costs = CostTable.uniform(2)
    makespans = [penstock.simulate(order, costs).makespan for order in (planned, safe)]
    assert makespans[0] < makespans[1]


def test_memory_of_each_rank_is_kept() -> None:
    costs = CostTable.uniform(2)
    run = AutoRun("mlp", (0, 1), options={"memory": [2, 1]}, num_steps=4)
    planned = Schedule.from_csv(run_locally(run)[0].schedules[-1])
    planned.verify(costs=costs, memory=[2, 1])
    with_more = AutoRun("mlp", (0, 1), options={"memory": 4}, num_steps=4)
    assert planned != Schedule.from_csv(run_locally(with_more)[0].schedules[-1])


def test_change_is_logged_on_one_rank_with_what_is_expected_and_what_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        run_locally(AutoRun("mlp", (0, 1), num_steps=9))
    changed, measured = (record.getMessage() for record in caplog.records)
    assert re.search(
        r"changed the schedule: expected to be 1\.\d\d times as fast as the first steps, within "
        r"\d\.\d% of the lower bound\n"
        r"  before: 1\.5e\+04 ms a step, bubble 20\.0%, memory 2 bytes\n"
        r"  after:  \S+ ms a step, bubble \S+%, memory \S+ bytes",
        changed,
    )
    assert re.fullmatch(
        r"measured: \d+\.\d\d times as fast, \S+ ms a step before and \S+ ms now", measured
    )


def test_schedule_that_cannot_be_beaten_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        ranks = run_locally(AutoRun("mlp", (0,), num_steps=10))
    (kept,) = (record.getMessage() for record in caplog.records)
    assert kept.startswith("kept the schedule: found none that is faster (1.2e+04 ms a step")
    assert ranks[0].schedules[1] == ranks[0].schedules[-1]


def test_schedule_is_planned_again_when_times_have_drifted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.auto.auto_pilot.LOOK_EVERY", 1)
    # The plan is made for seconds, and the steps take milliseconds.
    run = AutoRun("mlp", (0, 1), num_steps=16, options={"replan_when": 0.5})
    with caplog.at_level(logging.INFO, logger="penstock"):
        ranks = run_locally(run)
    assert_trained_alike(run, ranks)
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    drifted = "times have changed by 100 %"
    assert ["changed the schedule", "measured", drifted, "kept the schedule"] == said
    found = ranks[0].schedules
    assert found[2] == found[-1] != found[12]


def test_times_that_are_as_planned_do_not_change_the_plan(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.auto.auto_pilot.LOOK_EVERY", 1)
    run = AutoRun("mlp", (0, 1), num_steps=14, options={"replan_when": 2.0})
    with caplog.at_level(logging.INFO, logger="penstock"):
        run_locally(run)
    assert 2 == len(caplog.records)


@pytest.mark.filterwarnings("ignore:stage 1 on rank 1. it was compiled by torch.compile")
def test_stage_compiled_by_torch_is_planned_for() -> None:
    modules, batch = mlp(2), mlp_batch()
    expected = step_unsplit(modules, batch)
    modules[1].compile(backend="aot_eager")

    def main(group: LocalGroup) -> Schedule:
        pipeline = make_auto(group, modules, Placement.linear(2))
        for _ in range(5):
            zero_grad(modules[group.rank : group.rank + 1])
            pipeline.step(*batch.args, target=batch.target)
        return pipeline.schedule

    planned, _ = local_ranks(2, main)
    assert_same_grads("step", expected.grads, [named_grads(dict(enumerate(modules)))])
    planned.verify()


def test_values_that_skip_stages_arrive_over_the_change() -> None:
    skips = [Skip(0, 2), Skip(1, 3, "two")]
    modules = [SkipStage(index, 4, skips, ()).double() for index in range(4)]
    batch = mlp_batch()
    placement = Placement.v(2)

    def main(group: LocalGroup) -> list[torch.Tensor]:
        stages = [
            penstock.PipelineStage(
                module := modules[index],
                index,
                4,
                "cpu",
                group=group,
                skips_in=module.skips_in,
                skips_out=module.skips_out,
            )
            for index in placement.stages_of(group.rank)
        ]
        pipeline = ScheduleAuto(stages, 4, mean_square, auto=Auto(seconds=1))
        return [pipeline.step(*batch.args, target=batch.target) for _ in range(5)]

    outputs, _ = local_ranks(2, main)
    for found in outputs[1:]:
        torch.testing.assert_close(found, outputs[0], rtol=1e-12, atol=1e-12)


def test_forms_that_change_with_each_microbatch_are_measured_too() -> None:
    modules, batch = mlp(2), mlp_batch()
    expected = step_unsplit(modules, batch)

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [group.rank], dynamic_shapes=True)
        pipeline = ScheduleAuto(stages, 4, mean_square, auto=Auto(seconds=1))
        for _ in range(5):
            zero_grad(modules[group.rank : group.rank + 1])
            pipeline.step(*batch.args, target=batch.target)

    local_ranks(2, main)
    assert_same_grads("step", expected.grads, [named_grads(dict(enumerate(modules)))])


def test_class_is_found_by_its_name() -> None:
    assert ScheduleAuto is penstock.get_schedule_class("auto")
    assert ScheduleAuto is penstock.get_schedule_class("ScheduleAuto")


def test_memory_in_which_nothing_fits_is_rejected_on_all_ranks_with_the_smallest_that_does() -> (
    None
):
    modules, batch = mlp(2), mlp_batch()

    def main(group: LocalGroup) -> str:
        pipeline = make_auto(group, modules, Placement.linear(2), memory=100.0)
        for _ in range(2):
            pipeline.step(*batch.args, target=batch.target)
        with pytest.raises(penstock.errors.ScheduleError) as caught:
            pipeline.step(*batch.args, target=batch.target)
        return str(caught.value)

    first, second = local_ranks(2, main)
    assert first == second
    found = re.match(
        r"Nothing fits: rank 0 may hold 100, but one microbatch on its stages \[0\] needs "
        r"[0-9.]+\. The smallest memory that fits is (\d+) on each rank",
        first,
    )
    assert found is not None
    step_on_two_ranks(5, memory=int(found[1]))  # It does fit.


def test_schedule_is_not_known_before_the_first_step() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = make_auto(group, mlp(1), Placement.linear(1))
        assert 4 == pipeline.num_microbatches
        with pytest.raises(StageError, match="the schedule is not known yet: it depends on"):
            _ = pipeline.schedule

    local_ranks(1, main)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([[0], [0]], "stage 0 was given to ranks 0, 1. Expected each of the 2 stages on exactly"),
        ([[1], [1]], "stage 0 was given to no rank. Expected each of the 2 stages on exactly one"),
    ],
)
def test_stages_that_are_not_on_one_rank_each_are_rejected(
    held: list[list[int]], message: str
) -> None:
    def main(group: LocalGroup) -> None:
        stages = make_stages(group, mlp(2), held[group.rank])
        with pytest.raises(AgreementError, match=message):
            ScheduleAuto(stages, 4, mean_square).step(*mlp_batch().args)

    local_ranks(2, main)


def test_ranks_that_disagree_on_the_memory_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        pipeline = make_auto(group, mlp(2), Placement.linear(2), memory=1e6 + group.rank)
        with pytest.raises(AgreementError, match=r"disagree on schedule .*memory=1000001\.0"):
            pipeline.step(*mlp_batch().args)

    local_ranks(2, main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory is 0.0. Expected bytes that a rank may hold for its microbatches"),
        ({"memory": [1, "2"]}, r"memory is \(1.0, '2'\). Expected bytes that a rank may hold"),
        ({"memory": "12"}, "memory is '12'. Expected bytes that a rank may hold"),
        ({"slow_when": 0}, "slow_when is 0. Expected a share such as 0.5, to name ranks and links"),
        ({"replan_when": -0.2}, "replan_when is -0.2. Expected a share such as 0.2, to plan again"),
        ({"measure_steps": 0}, "measure_steps is 0. Expected a whole number, at least 1."),
        ({"seconds": "1"}, "seconds is '1'. Expected a positive number."),
        ({"recompute": "yes"}, "recompute is 'yes'. Expected True or False."),
        ({"recompute": True}, "recompute is True, but memory is None. Without a limit, nothing is"),
        (
            {"num_microbatches": None},
            "num_microbatches is None. Expected a whole number, at least 1.",
        ),
        ({"loss_fn": None}, 'schedule is "auto", which needs a loss_fn: without a backward there'),
    ],
)
def test_option_that_makes_no_sense_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        step_on_two_ranks(**options)


def test_numbers_of_any_kind_are_memory() -> None:
    for memory in (np.int64(10**6), np.array(1e6), np.array([10**6, 10**6]), Fraction(10**6)):
        step_on_two_ranks(memory=memory)


def test_data_parallel_stages_without_known_replicas_are_rejected() -> None:
    """Replicas would find schedules of their own, and reduce gradients with the wrong ones."""

    class Wrapped(penstock.PipelineStage):
        is_reduced = True  # type: ignore[assignment]

    def main(group: LocalGroup) -> None:
        stages = [Wrapped(nn.Linear(2, 2), index, 2, "cpu", group=group) for index in range(2)]
        pipeline = Pipeline(
            stages, "auto", num_microbatches=2, loss_fn=mean_square, scale_grads=False
        )
        with pytest.raises(
            StageError, match=r"stages \[0, 1\] are data parallel .* but rank 0 does"
        ):
            pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))

    local_ranks(1, main)


def test_memory_for_another_number_of_ranks_is_rejected() -> None:
    with pytest.raises(CostError, match=r"memory has 3 values, but there are 2 ranks\. Give one"):
        step_on_two_ranks(memory=[1e6] * 3)


def test_smallest_memory_of_each_rank_is_enough() -> None:
    """An I may leave more than its F did, so that only full backwards fit."""
    modules, batch = mlp(2), mlp_batch()

    def main(group: LocalGroup) -> None:
        stages = make_stages(group, modules, [group.rank])
        costs = penstock.measure_costs(
            stages, 4, mean_square, *batch.args, target=batch.target, repeats=1
        )
        memory = Problem.of(costs, Placement.linear(2), 4).smallest_caps
        pipeline = make_auto(group, modules, Placement.linear(2), memory=memory)
        for _ in range(5):
            pipeline.step(*batch.args, target=batch.target)
        pipeline.schedule.verify(costs=costs, memory=memory)

    local_ranks(2, main)


def test_custom_function_runs_in_every_step() -> None:
    modules, batch = mlp(2), mlp_batch()

    def main(group: LocalGroup) -> int:
        pipeline = make_auto(group, modules, Placement.linear(2))
        seen: list[Any] = []

        def custom(action: Any, context: Any) -> None:
            seen.append(action)
            context.run(action)

        pipeline.register_custom_function(Forward, custom)
        for _ in range(5):  # Of all kinds: split, full, and what was found.
            pipeline.step(*batch.args, target=batch.target)
        return len(seen)

    assert [20, 20] == local_ranks(2, main)


def no_peers() -> Peers:
    return Peers.of((), torch.device("cpu"), 10.0)


def test_search_takes_no_longer_than_half_of_what_others_wait() -> None:
    assert 5.0 == AutoPilot(Auto(seconds=60), 10.0, no_peers)._search_s
    assert 1.0 == AutoPilot(Auto(seconds=1), 10.0, no_peers)._search_s


def test_schedule_is_planned_for_the_work_of_measured_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Microbatches run by the rule before and after, and the gradients are those of the model."""
    caplog.set_level("INFO", "penstock")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(2)))
    whole = copy.deepcopy(model)
    x, target = torch.randn(2, 8, 6, dtype=torch.float64)

    def main(group: LocalGroup) -> None:
        stage = penstock.PipelineStage(model[group.rank], group.rank, 2, "cpu", group=group)
        pipeline = penstock.Pipeline(
            stage,
            Auto(seconds=1),
            num_microbatches=4,
            loss_fn=nn.functional.mse_loss,
            by_work=True,
        )
        for work in ([4.0, 1.0, 2.0, 1.0], [1.0, 3.0, 1.0, 2.0], [1.0, 2.0, 4.0, 1.0]) * 2:
            pipeline.step(x, target=target, work=work)

    penstock.local_ranks(2, main)
    planned = [r.getMessage() for r in caplog.records if "the schedule:" in r.getMessage()]
    assert 1 == len(planned)
    assert "for microbatches of 0.67 to 2.7 times the median work" in planned[0]
    (6 * nn.functional.mse_loss(whole(x), target)).backward()
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
