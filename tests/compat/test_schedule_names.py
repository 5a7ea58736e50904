"""What scripts for torch.distributed.pipelining read, write and define on schedules."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_ranks import M, held_by, on_ranks, steps
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

import penstock
from local_steps import (
    WIDTH,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    step_unsplit,
)
from penstock import LocalGroup, compat
from penstock.compat import schedules, stage
from penstock.errors import (
    AgreementError,
    AssignmentError,
    PipeliningShapeError,
    ScheduleError,
    StageError,
)
from stage_training import assert_close
from staged_models import StepRecord

MULTI = {
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleLoopedBFS": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}


def check(modules: list[nn.Module], make: Any, **options: Any) -> list[Any]:
    batch = mlp_batch()
    expected = step_unsplit(modules, batch)
    results = on_ranks(modules, make, steps(batch), **options)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))
    return results


@pytest.mark.parametrize("name", MULTI)
def test_kinds_of_classes_are_as_in_torch(name: str) -> None:
    """torchtitan asks issubclass(schedule_class, PipelineScheduleMulti), and the like."""
    for base in ("_PipelineSchedule", "PipelineScheduleMulti", "_PipelineScheduleRuntime"):
        assert issubclass(getattr(torch_schedules, name), getattr(torch_schedules, base))
        assert issubclass(getattr(schedules, name), getattr(schedules, base))
    assert not issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle)


@pytest.mark.parametrize(("name", "style"), MULTI.items())
def test_what_clients_read_before_and_after_a_step(name: str, style: str) -> None:
    batch = mlp_batch()

    def main(schedule: Any) -> None:
        assert M == schedule._n_microbatches
        assert 4 == schedule._num_stages
        assert 2 == schedule.pp_group_size
        assert schedule.rank == schedule._stages[0].group_rank
        assert held_by(schedule.rank, style=style) == [s.stage_index for s in schedule._stages]
        assert schedule._loss_fn is mean_square
        assert schedule.scale_grads is True
        assert schedule._args_chunk_spec is schedule._kwargs_chunk_spec is None
        assert schedule._has_backward
        ranks = compat._utils.generate_stage_to_rank_mapping(2, 4, style)
        assert ranks == schedule.stage_index_to_group_rank
        assert all(ranks == each.stage_index_to_group_rank for each in schedule._stages)
        assert {0, 1} == set(schedule.pipeline_order)
        assert not schedule._stages_forward_initialized
        assert not schedule._stages_backward_initialized
        assert Counter() == schedule.backward_counter
        outputs = schedule.step(*batch.args, target=batch.target)
        assert schedule._stages_forward_initialized
        assert schedule._stages_backward_initialized
        assert Counter({s.stage_index: M for s in schedule._stages}) == schedule.backward_counter
        last = [s for s in schedule._stages if s.is_last]
        for each in schedule._stages:
            assert each.has_backward
            assert (M if each.is_last else 0) == len(each.output_chunks)
        if last:
            assert torch.equal(outputs, torch.cat(last[0].output_chunks))
            last[0].clear_runtime_states()
            assert [] == last[0].output_chunks
        schedule.eval(*batch.args)
        assert not any(each.has_backward for each in schedule._stages)

    on_ranks(mlp(), getattr(compat, name), main, style=style)


def test_what_clients_read_of_a_schedule_with_one_stage() -> None:
    def main(schedule: Any) -> None:
        assert schedule._stage.stage_index == schedule._stage.group_rank
        assert not schedule._stage_forward_initialized
        assert not schedule._stage_backward_initialized
        schedule.step(*batch.args, target=batch.target)
        assert schedule._stage_forward_initialized
        assert schedule._stage_backward_initialized

    batch = mlp_batch()
    on_ranks(mlp(), compat.Schedule1F1B, main, num_ranks=4)


def test_specs_and_loss_can_be_changed_between_steps() -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)

    def main(schedule: Any) -> tuple[Any, list[Any]]:
        schedule._loss_fn = lambda outputs, target: mean_square(outputs, target.T)
        schedule._args_chunk_spec = (compat.TensorChunkSpec(0),)
        schedule._output_merge_spec = compat.TensorChunkSpec(1)
        schedule.step(*batch.args, target=torch.cat([t.T for t in batch.target.split(2)]))
        for each in schedule._stages:
            each.submod.zero_grad()
        schedule._loss_fn = mean_square
        schedule._output_merge_spec = None
        return steps(batch)(schedule)

    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))


@pytest.mark.parametrize(
    "name", ["_n_microbatches", "_num_stages", "_stages", "_has_backward", "backward_counter"]
)
def test_assignment_without_effect_is_refused(name: str) -> None:
    def main(schedule: Any) -> None:
        with pytest.raises(AssignmentError, match=f"{name} of a ScheduleInterleaved1F1B cannot be"):
            setattr(schedule, name, 3)
        with pytest.raises(AssignmentError, match="has_backward of a PipelineStage cannot be"):
            schedule._stages[0].has_backward = True
        with pytest.raises(AssignmentError, match="output_chunks of a PipelineStage cannot be"):
            schedule._stages[0].output_chunks = []

    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


class GivesOrder(compat.PipelineScheduleMulti):
    """A subclass as torch's own are: it fills pipeline_order, and says where stages are."""

    def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
        self.pp_group_size = stages[0].group_size
        super().__init__(stages, n_microbatches, **options)
        self.rank = stages[0].group_rank
        self.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
        for each in self._stages:
            each.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order = {}
        action, kinds = schedules._Action, schedules
        for rank in range(self.pp_group_size):
            low, high = held_by(rank, style="v")
            order: list[Any] = [None] * rank
            order += [action(low, kinds.FORWARD, mb) for mb in range(n_microbatches)]
            order += [action(high, kinds.FORWARD, mb) for mb in range(n_microbatches)]
            for index in (high, low):
                for mb in range(n_microbatches):
                    order.append(action(index, kinds.BACKWARD_INPUT, mb))
                    order.append(action(index, kinds.BACKWARD_WEIGHT, mb))
            self.pipeline_order[rank] = order


class GivesOrderWithComms(schedules._PipelineScheduleRuntime, GivesOrder):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prepare_schedule_with_comms(self.pipeline_order)


@pytest.mark.parametrize("make", [GivesOrder, GivesOrderWithComms])
def test_subclass_that_gives_an_order_trains_as_unsplit(make: Any) -> None:
    check(mlp(), make, style="v")


def test_subclass_that_says_the_wrong_ranks_is_refused() -> None:
    class Wrong(GivesOrder):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.pp_group_size = 3

    message = "pp_group_size of Wrong was set to 3, but its stages and its order say 2"
    with pytest.raises(StageError, match=message):
        on_ranks(mlp(), Wrong, steps(mlp_batch()), style="v")


def test_subclass_with_a_loop_of_its_own_is_refused() -> None:
    class Loop(compat.PipelineScheduleMulti):
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    with pytest.raises(StageError, match="Loop overrides _step_microbatches, but Penstock runs"):
        on_ranks(mlp(), Loop, steps(mlp_batch()))


def test_schedule_without_an_order_is_refused() -> None:
    with pytest.raises(StageError, match="PipelineScheduleMulti has no order yet"):
        on_ranks(mlp(), compat.PipelineScheduleMulti, steps(mlp_batch()))


def test_order_with_other_microbatches_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")

    def main(schedule: Any) -> None:
        with pytest.raises(ScheduleError, match="pipeline_order has 1 microbatches, but n_micro"):
            schedule._load_csv(file)

    on_ranks(mlp(), compat.PipelineScheduleMulti, main)


def test_order_changed_after_a_step_is_refused() -> None:
    batch = mlp_batch()

    def main(schedule: Any) -> None:
        schedule.step(*batch.args, target=batch.target)
        schedule.pipeline_order[0].reverse()
        with pytest.raises(ScheduleError, match="pipeline_order was changed after the first step"):
            schedule.step(*batch.args, target=batch.target)

    on_ranks(mlp(), GivesOrder, main, style="v")


@pytest.mark.parametrize("has_comms", [False, True])
@pytest.mark.parametrize(("name", "style"), MULTI.items())
def test_written_order_is_loaded_by_penstock_and_by_torch(
    name: str, style: str, has_comms: bool, tmp_path: Path
) -> None:
    """Torch's loader validates an order, and simulates one with messages."""
    format = "compute_comms" if has_comms else "compute_only"
    file = tmp_path / "order.csv"

    def write(schedule: Any) -> None:
        if schedule.rank == 0:
            schedule._dump_csv(file, format=format)

    on_ranks(mlp(), getattr(compat, name), write, style=style)

    class Loads(schedules._PipelineScheduleRuntime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._load_csv(file, format=format)

    check(mlp(), Loads, style=style)
    lines = file.read_text().splitlines()
    order = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(lines)
    }
    ranks = torch_schedules._validate_schedule(order, 2, 4, M)
    assert compat._utils.generate_stage_to_rank_mapping(2, 4, style) == ranks
    if has_comms:
        # torch's simulator knows neither pairs of actions nor gathers.
        parts = {
            rank: [p for cell in row for p in cell.sub_actions or (cell,)]
            for rank, row in order.items()
        }
        known = {
            rank: [p for p in row if p.microbatch_index is not None] for rank, row in parts.items()
        }
        torch_schedules._simulate_comms_compute(known, ranks.__getitem__, 4)


def test_file_with_messages_needs_its_format(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0SEND_F0\n1RECV_F0,1F0\n")

    def main(schedule: Any) -> None:
        with pytest.raises(ScheduleError, match="rank 0, cell 1: 0SEND_F0 is not a forward or"):
            schedule._load_csv(file)
        with pytest.raises(ScheduleError, match="format is 'csv'"):
            schedule._load_csv(file, format="csv")

    on_ranks(mlp(), compat.PipelineScheduleMulti, main)


def test_failed_step_leaves_the_schedule_usable() -> None:
    """A batch of a wrong width fails on all ranks; the next one trains as if nothing happened."""
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)

    def main(schedule: Any) -> tuple[Any, list[Any]]:
        with pytest.raises(RuntimeError):
            schedule.step(randn(8, WIDTH + 1), target=batch.target)
        return steps(batch)(schedule)

    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))


def test_ranks_that_failed_in_different_steps_do_not_go_on() -> None:
    """They would train on different batches."""
    batch = mlp_batch()

    def main(schedule: Any) -> str:
        with pytest.raises(RuntimeError):
            schedule.step(randn(8, WIDTH + 1), target=batch.target)
        schedule._num_steps += schedule.rank
        with pytest.raises(AgreementError, match="disagree on the number of steps so far"):
            schedule.step(*batch.args, target=batch.target)
        return "refused"

    assert ["refused"] * 2 == on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_shapes_are_learned_again_on_request() -> None:
    """NeMo's way to another length of sequences: _stages_forward_initialized = False."""
    modules = mlp()

    def main(schedule: Any) -> tuple[Any, list[Any]]:
        schedule.step(*small.args, target=small.target)
        with pytest.raises((PipeliningShapeError, RuntimeError), match="16"):
            schedule.step(*large.args, target=large.target)
        for each in schedule._stages:
            each.submod.zero_grad()
        schedule.step(*small.args, target=small.target)
        schedule._stages_forward_initialized = False
        for each in schedule._stages:
            each.submod.zero_grad()
            each.args_recv_info, each.grad_recv_info, each.grad_send_info = {}, {}, None
            with pytest.raises(AssignmentError, match=r"args_recv_info was set to \{0: 1\}"):
                each.args_recv_info = {0: 1}
            assert {} == each.args_recv_info
        return steps(large)(schedule)

    small, large = mlp_batch(4), mlp_batch(64)
    expected = step_unsplit(modules, large)
    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))


def test_stages_cannot_be_called_initialized_before_a_step() -> None:
    def main(schedule: Any) -> None:
        with pytest.raises(StageError, match="no step has run yet"):
            schedule._stages_forward_initialized = True

    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_batch_that_is_already_cut() -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    cut = {
        "arg_mbs": [(x,) for x in batch.args[0].tensor_split(M)],
        "target_mbs": list(batch.target.tensor_split(M)),
    }

    def main(schedule: Any) -> tuple[Any, list[Any], Any]:
        losses: list[Any] = []
        outputs = schedule.step(**cut, losses=losses)
        return outputs, losses, schedule.eval(**cut)

    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main)
    outputs, losses, again = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))
    assert torch.equal(outputs, again)


def test_step_takes_a_batch_or_microbatches_but_not_both() -> None:
    def main(schedule: Any) -> None:
        with pytest.raises(StageError, match="both a batch and microbatches"):
            schedule.step(*batch.args, target_mbs=[batch.target])
        with pytest.raises(TypeError, match="arg_mbs is a tuple"):
            schedule.step(arg_mbs=batch.args)
        with pytest.raises(TypeError, match="losses is a tuple"):
            schedule.step(*batch.args, target=batch.target, losses=())

    batch = mlp_batch()
    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_stages_that_are_not_sharded_are_complete_after_each_step() -> None:
    """As in torch, where finalize_gradients is about FSDP2 alone."""
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    main = steps(batch, finalize_gradients=False)
    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))


def test_step_where_gradients_are_disabled_is_a_runtime_error() -> None:
    def main(schedule: Any) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are disabled"):
            schedule.step(*batch.args, target=batch.target)

    batch = mlp_batch()
    on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)


def test_losses_are_left_alone_on_ranks_without_the_last_stage() -> None:
    def main(schedule: Any) -> list[Any]:
        losses: list[Any] = ["mine"]
        schedule.step(*batch.args, target=batch.target, losses=losses)
        return losses

    batch = mlp_batch()
    first, last = on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main)
    assert ["mine"] == first
    assert M == len(last)


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZBH1"])
def test_several_losses_are_trained_as_their_sum(name: str) -> None:
    modules, batch = mlp(), mlp_batch()

    def both(outputs: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_square(outputs, target), {"l1": nn.functional.l1_loss(outputs, target)}

    expected = step_unsplit(modules, batch, lambda *x: sum(both(*x)[1].values(), both(*x)[0]))
    results = on_ranks(modules, getattr(compat, name), steps(batch), num_ranks=4, loss_fn=both)
    outputs, losses = results[3]
    sums = [first + rest["l1"] for first, rest in losses]
    assert_same(expected, StepRecord(outputs, sums, grads_of(modules)))


def test_loss_that_is_not_a_tensor_is_still_refused() -> None:
    options = {"loss_fn": lambda outputs, target: (1.0, "a")}
    with pytest.raises(StageError, match=r"loss_fn returned a loss \(1.0, 'a'\)"):
        on_ranks(mlp(), compat.Schedule1F1B, steps(mlp_batch()), num_ranks=4, **options)


def test_outputs_without_a_loss_can_be_differentiated() -> None:
    """As torch's: the graph begins where the last stage's inputs arrive."""
    modules, batch = mlp(), mlp_batch()

    def main(schedule: Any) -> Any:
        with torch.no_grad():
            assert not (schedule.step(*batch.args) is not None and schedule._stages[0].is_first)
        outputs = schedule.step(*batch.args)
        if outputs is not None:
            mean_square(outputs, batch.target).backward()
        evaluated = schedule.eval(*batch.args)
        return outputs, None if evaluated is None else evaluated.requires_grad

    expected = step_unsplit(modules, batch)
    _, (outputs, is_graph) = on_ranks(modules, compat.ScheduleInterleaved1F1B, main, loss_fn=None)
    assert_close("outputs", expected.outputs, outputs.detach())
    assert is_graph is False
    grads = {name: grad for name, grad in grads_of(modules).items() if grad is not None}
    assert grads
    assert all(name.startswith("3") for name in grads)
    for name, grad in grads.items():
        assert_close(name, expected.grads[name], grad)


def test_outputs_are_reduced_by_a_reducer() -> None:
    batch = mlp_batch()

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.sum()

    spec = (compat.TensorChunkSpec(0), compat.microbatch.sum_reducer)
    results = on_ranks(
        [*mlp(3), Sums()],
        compat.ScheduleInterleaved1F1B,
        lambda schedule: schedule.eval(*batch.args),
        output_merge_spec=spec,
    )
    outputs, total = results[1]
    assert_close("total", outputs.sum(), total)


def test_forward_only_refuses_a_target() -> None:
    batch = mlp_batch()

    def main(schedule: Any) -> Any:
        with pytest.raises(RuntimeError, match="this schedule has forwards only"):
            schedule.step(*batch.args, target=batch.target)
        return schedule.step(*batch.args)

    modules = mlp()
    results = on_ranks(modules, schedules._ScheduleForwardOnly, main, num_ranks=4, loss_fn=None)
    assert_close("outputs", step_unsplit(modules, batch).outputs, results[3].detach())


def test_scaled_gradients_of_a_stage() -> None:
    module = nn.Linear(2, 2)

    def main(group: LocalGroup) -> None:
        own = stage.PipelineStage(module, 0, 1, "cpu", group=group)
        assert {0: 0} == own.stage_index_to_group_rank
        module(torch.ones(1, 2)).sum().backward()
        own.scale_grads(4)

    penstock.local_ranks(1, main)
    assert torch.equal(torch.full((2, 2), 0.25), module.weight.grad)


def test_use_full_backward_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(mlp(), GivesOrder, steps(mlp_batch()), style="v", use_full_backward=True)
    assert "use_full_backward has no effect" in caplog.text
