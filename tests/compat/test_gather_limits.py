"""Arguments of torch 2.15's schedules: limits of gathers and of messages."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compat_ranks import M, on_ranks, steps
from torch.distributed.pipelining import schedules as torch_schedules

from local_steps import assert_same, grads_of, mlp, mlp_batch, step_unsplit
from penstock import compat
from penstock.compat import schedules
from penstock.compat.gather_limits import GatherLimits
from penstock.errors import ScheduleError
from penstock.ir import Reshard, Schedule, Unshard
from penstock.passes import Gathers, add_comms, add_gathers, remove_gathers
from penstock.schedules import get, names
from penstock.torch_private import LOADS_WAITS
from staged_models import StepRecord

NEEDS_2_15 = "new in torch 2.15, and another torch is installed"


def interleaved(per_rank: int, num_ranks: int = 2) -> Schedule:
    return get("Interleaved1F1B")(num_ranks=num_ranks, num_microbatches=4, stages_per_rank=per_rank)


def most_gathered(schedule: Schedule) -> list[int]:
    """The most stages that each rank has gathered at once."""
    found = []
    for order in schedule.orders:
        gathered: set[int] = set()
        most = 0
        for action in order:
            if isinstance(action, Unshard):
                gathered.add(action.stage)
            elif isinstance(action, Reshard):
                gathered.remove(action.stage)
            most = max(most, len(gathered))
        found.append(most)
    return found


def first_gathers(schedule: Schedule) -> list[int]:
    """How many stages each rank gathers before its first forward."""
    return [
        next(place for place, action in enumerate(order) if not isinstance(action, Unshard))
        for order in schedule.orders
    ]


@pytest.mark.parametrize(
    ("per_rank", "limits", "most", "first"),
    [
        (4, GatherLimits(), [3, 3], [3, 3]),
        (2, GatherLimits(max_active_stages=1), [1, 1], [1, 1]),
        (4, GatherLimits(2), [2, 2], [2, 2]),
        (4, GatherLimits(4, (1, 3)), [4, 4], [1, 3]),
        (4, GatherLimits(3, "auto"), [3, 3], [2, 3]),
        (2, GatherLimits(3, "auto"), [2, 2], [2, 2]),
    ],
)
def test_limits_are_kept(
    per_rank: int, limits: GatherLimits, most: list[int], first: list[int]
) -> None:
    schedule = interleaved(per_rank)
    placed = limits.place(schedule)
    placed.verify()
    assert schedule == remove_gathers(placed)
    assert most == most_gathered(placed)
    assert first == first_gathers(placed)


def test_nothing_is_placed_where_a_rank_may_have_all_of_its_stages_gathered() -> None:
    schedule = interleaved(3)
    assert schedule is GatherLimits().place(schedule)
    assert schedule is GatherLimits(3).place(schedule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ((most,), f"max_active_stages is {most!r}. Expected a whole number")
            for most in (0, -1, 1.5, True, "3")
        ),
        *(
            ((3, lookahead), r"unshard_lookahead is .* Expected \"full\", \"auto\", or a tuple")
            for lookahead in ("half", 2, [1, 1], None)
        ),
        *(
            ((3, (1, count)), rf"unshard_lookahead is {count} for rank 1\. Expected a whole number")
            for count in (0, 4, True, 1.0)
        ),
        ((3, (1, 1, 1)), "unshard_lookahead has 3 values, but there are 2 ranks"),
    ],
)
def test_arguments_are_checked_as_torch_does(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        GatherLimits(*arguments).place(interleaved(2))
    if hasattr(torch_schedules, "_resolve_unshard_lookahead"):
        most, lookahead = (*arguments, "full")[:2]
        with pytest.raises(ValueError, match=r"max_active_stages|unshard_lookahead"):
            torch_schedules._resolve_unshard_lookahead(lookahead, 2, most)


def test_overlap_that_needs_more_stages_than_allowed_is_refused() -> None:
    with pytest.raises(ScheduleError, match="needs 2 stages at once"):
        GatherLimits(1).place(get("DualPipeV")(num_ranks=2, num_microbatches=4))


def test_order_that_says_when_to_gather_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    gathered = add_gathers(interleaved(4), Gathers.once())
    assert gathered is GatherLimits().place(gathered)
    assert not caplog.records
    assert gathered is GatherLimits(2).place(gathered)
    assert "max_active_stages=2 has no effect: the order says" in caplog.text
    with pytest.raises(ScheduleError, match="but the order says itself when stages are gathered"):
        GatherLimits(3, "auto").place(gathered)


@pytest.mark.skipif(not LOADS_WAITS, reason=NEEDS_2_15)
def test_stages_are_gathered_no_more_often_than_by_torch() -> None:
    for per_rank, most, given in product((2, 3, 4), (1, 2, 3), ("full", "auto", (1, 1))):
        schedule = interleaved(per_rank)
        placed = GatherLimits(most, given).place(schedule)
        counts = torch_schedules._resolve_unshard_lookahead(given, 2, most)
        for rank, order in enumerate(schedule.orders):
            theirs = torch_schedules._add_unshard_reshard(
                [torch_schedules._Action.from_str(str(action)) for action in order],
                most,
                unshard_lookahead=counts[rank],
            )
            ours, other = (
                sum(str(action).endswith("UNSHARD") for action in actions)
                for actions in (placed.orders[rank], theirs)
            )
            assert ours <= other, (per_rank, most, given, rank)


@pytest.mark.parametrize("options", [{"max_active_stages": 1}, {"unshard_lookahead": (1, 2)}])
def test_schedules_with_limits_train_as_unsplit_and_keep_their_order(
    options: dict[str, Any],
) -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)

    def main(schedule: Any) -> Any:
        assert schedule.schedule.has_sharding
        assert all(cell.is_compute_op for row in schedule.pipeline_order.values() for cell in row)
        cells = [str(c) for row in schedule.pipeline_order_with_comms.values() for c in row]
        assert any(cell.endswith("UNSHARD") for cell in cells)
        return steps(batch)(schedule)

    results = on_ranks(modules, compat.ScheduleInterleaved1F1B, main, **options)
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))


@pytest.mark.parametrize("make", [compat.ScheduleLoopedBFS, compat.ScheduleInterleavedZeroBubble])
def test_arguments_without_effect_are_taken_and_the_log_says_so(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def main(schedule: Any) -> None:
        assert not schedule.schedule.has_sharding

    on_ranks(mlp(), make, main, defer_reduce_grad_wait=True)
    assert not caplog.records
    on_ranks(mlp(), make, main, max_outstanding_sends=2)
    assert "max_outstanding_sends=2 has no effect: sends are waited for at the end" in caplog.text


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        *((limit, "Expected a whole number of messages") for limit in (-1, True, 1.0, "2")),
        (0, "max_outstanding_sends is 0, but 2 ranks cannot work without messages"),
    ],
)
def test_limit_of_messages_is_checked(limit: Any, message: str) -> None:
    def main(schedule: Any) -> None:
        raise AssertionError("it was made")

    with pytest.raises(ScheduleError, match=message):
        on_ranks(mlp(), compat.ScheduleInterleaved1F1B, main, max_outstanding_sends=limit)


# What torch 2.15 loads.


class Held:
    """All that torch's schedules ask of a stage while they load an order."""

    def __init__(self, schedule: Schedule, rank: int, index: int) -> None:
        self.stage_index, self.num_stages = index, schedule.num_stages
        self.group_size, self.group_rank = schedule.num_ranks, rank
        self.stage_index_to_group_rank: dict[int, int] = {}


def load_in_torch(schedule: Schedule, text: str, path: Path, format: str) -> Any:
    """Load a text into torch's own class, on rank 0."""
    path.write_text(text)
    held = [Held(schedule, 0, index) for index in schedule.placement.stages_of(0)]
    runtime = torch_schedules._PipelineScheduleRuntime(held, schedule.num_microbatches)
    runtime._load_csv(path, format=format)
    return runtime


ADDED: dict[str, Callable[[Schedule], Schedule]] = {
    "messages": add_comms,
    "messages and gathers": lambda schedule: add_comms(add_gathers(schedule, Gathers.once())),
    "gathers per need": lambda schedule: add_comms(add_gathers(schedule, Gathers.per_need())),
}


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("name", [name for name in names() if name != "ForwardOnly"])
def test_written_file_is_loaded_by_this_torch(name: str, added: str, tmp_path: Path) -> None:
    for num_ranks, num_microbatches in ((2, 4), (4, 8)):
        plain = get(name)(num_ranks=num_ranks, num_microbatches=num_microbatches)
        schedule = ADDED[added](plain)
        path = tmp_path / "order.csv"
        text = schedule.to_csv(has_waits=LOADS_WAITS)
        loaded = load_in_torch(schedule, text, path, "compute_comms")
        assert list(schedule.placement.ranks) == [
            loaded.stage_index_to_group_rank[stage] for stage in range(schedule.num_stages)
        ]
        load_in_torch(plain, plain.to_csv(), path, "compute_only")
        if LOADS_WAITS:
            with pytest.raises(ValueError, match=r"no matching wait|REDUCE_GRAD"):
                load_in_torch(schedule, schedule.to_csv(), path, "compute_comms")


def test_file_of_torch_with_waits_is_loaded(tmp_path: Path) -> None:
    modules, batch = mlp(), mlp_batch()
    expected = step_unsplit(modules, batch)
    plain = get("Interleaved1F1B")(num_ranks=2, num_microbatches=M)
    path = tmp_path / "order.csv"
    path.write_text(add_comms(add_gathers(plain, Gathers.once())).to_csv(has_waits=True))

    class Loads(schedules._PipelineScheduleRuntime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._load_csv(str(path), format="compute_comms")

    results = on_ranks(modules, Loads, steps(batch))
    outputs, losses = next(result for result in results if result[1])
    assert_same(expected, StepRecord(outputs, losses, grads_of(modules)))
