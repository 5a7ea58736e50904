"""Custom functions with torch's constants, actions and context."""

import threading
from collections import Counter
from typing import Any

import pytest
from compat_ranks import M, on_ranks, steps

from local_steps import assert_same, grads_of, mlp, mlp_batch, step_unsplit
from penstock import compat
from penstock.compat import schedules
from penstock.errors import StageError
from penstock.ir import Forward
from staged_models import StepRecord

KINDS = [
    schedules.FORWARD,
    schedules.FULL_BACKWARD,
    schedules.BACKWARD_INPUT,
    schedules.BACKWARD_WEIGHT,
    schedules.OVERLAP_F_B,
]


def run_as_torch_does(action: Any, ctx: Any) -> None:
    """A function as clients write them: it drives the stages of the schedule."""
    schedule = ctx.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    for part in action.sub_actions or (action,):
        stage, mb = stages[part.stage_index], part.microbatch_index
        match part.computation_type:
            case schedules.FORWARD:
                assert (stage.stage_index, mb) in schedule.fwd_recv_ops
                schedules._wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, mb)))
                schedule._assert_unsharded(stage)
                output = stage.forward_one_chunk(mb, ctx.arg_mbs[mb], ctx.kwarg_mbs[mb])
                schedule._maybe_compute_loss(stage, output, ctx.target_mbs, mb)
                if stage.stage_index + 1 in stages:
                    stages[stage.stage_index + 1].set_local_fwd_input(output, mb)
            case schedules.BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(mb)
            case kind:
                schedules._wait_batch_p2p(schedule.bwd_recv_ops.pop((stage.stage_index, mb)))
                loss = schedule._maybe_get_loss(stage, mb)
                stage.backward_one_chunk(mb, loss, kind == schedules.FULL_BACKWARD)
                if stage.stage_index - 1 in stages:
                    grads = stage.get_local_bwd_output(mb)
                    stages[stage.stage_index - 1].set_local_bwd_input(grads, mb)


@pytest.mark.parametrize("name", ["ScheduleDualPipeV", "ScheduleZBVZeroBubble"])
def test_functions_for_all_actions_train_as_unsplit(name: str) -> None:
    modules, batch, calls = mlp(), mlp_batch(), Counter[str]()
    expected = step_unsplit(modules, batch)

    def main(schedule: Any) -> Any:
        def called(action: Any, ctx: Any) -> None:
            calls[action.computation_type.name] += 1
            assert ctx.schedule_ref is schedule
            assert M == len(ctx.arg_mbs) == len(ctx.kwarg_mbs)
            run_as_torch_does(action, ctx)

        for kind in KINDS:
            schedule.register_custom_function(kind, called)
        return steps(batch)(schedule)

    results = on_ranks(modules, getattr(compat, name), main, style="v")
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))
    assert calls["FORWARD"] > 0
    assert calls["OVERLAP_F_B"] > 0 or name == "ScheduleZBVZeroBubble"


def test_function_that_runs_nothing_is_refused() -> None:
    def main(schedule: Any) -> Any:
        schedule.register_custom_function(schedules.FORWARD, lambda action, ctx: None)
        return steps(mlp_batch())(schedule)

    with pytest.raises(StageError, match="returned without running 0F0"):
        on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_function_that_changes_the_arguments_is_refused() -> None:
    def changed(action: Any, ctx: Any) -> None:
        stages = {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
        mb = action.microbatch_index
        stages[action.stage_index].forward_one_chunk(mb, (ctx.arg_mbs[mb][0] + 1,), {})

    def main(schedule: Any) -> Any:
        if schedule.rank == 0:
            schedule.register_custom_function(schedules.FORWARD, changed)
        return steps(mlp_batch())(schedule)

    with pytest.raises(StageError, match="gave 0F0 other arguments than those of its microbatch"):
        on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_function_that_runs_an_action_in_a_thread_is_refused() -> None:
    """torchtitan's overlap of expert parallelism runs forward and backward in two threads."""
    caught: list[BaseException] = []

    def in_thread(action: Any, ctx: Any) -> None:
        def run() -> None:
            try:
                run_as_torch_does(action, ctx)
            except StageError as exc:
                caught.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def main(schedule: Any) -> Any:
        schedule.register_custom_function(schedules.FORWARD, in_thread)
        return steps(mlp_batch())(schedule)

    with pytest.raises(StageError, match="returned without running"):
        on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)
    assert "runs 0F0 in a thread of its own" in str(caught[0])


@pytest.mark.parametrize("kind", [schedules.UNSHARD, schedules.SEND_F, schedules.REDUCE_GRAD])
def test_actions_without_a_stage_cannot_be_replaced(kind: Any) -> None:
    def main(schedule: Any) -> None:
        with pytest.raises(StageError, match=f"computation_type is {kind.name}, which cannot be"):
            schedule.register_custom_function(kind, run_as_torch_does)

    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_stages_do_not_run_by_themselves() -> None:
    def main(schedule: Any) -> None:
        with pytest.raises(StageError, match="0F0 was called outside of a custom function"):
            schedule._stages[0].forward_one_chunk(0)

    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, lambda s: main(s) if s.rank == 0 else None)


def test_penstock_s_own_types_still_work() -> None:
    calls: list[str] = []

    def main(schedule: Any) -> Any:
        def called(action: Any, context: Any) -> None:
            calls.append(str(action))
            context.run(action)

        schedule.register_custom_function(Forward, called)
        return steps(mlp_batch())(schedule)

    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)
    assert 4 * M == len(calls)
