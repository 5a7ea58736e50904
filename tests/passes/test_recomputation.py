"""Recomputation as an action: where it may be, what it costs and holds, how it is written."""

import re

import pytest
from rich.console import Console

from penstock import CostTable, simulate
from penstock.draw import Panel
from penstock.draw.in_terminal import terminal
from penstock.errors import ScheduleError
from penstock.ir import Forward, Placement, Recompute, Schedule
from penstock.passes import add_comms, add_recompute, remove_recompute
from penstock.passes.simpler_orders import keep_forwards
from penstock.schedules import get

TWO = "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n"
COSTS = CostTable.uniform(
    2,
    forward=2.0,
    recompute=1.5,
    after_forward=10.0,
    after_input=4.0,
    after_dropping=1.0,
    during_dropping=3.0,
    during_recompute=12.0,
)


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        "0F0,0R0,0I0,0W0\n",
        "0F0,0F1,0R1,0R0,0B0,0B1\n",
        "0F0,0R0,(0F1;0B0)OVERLAP_F_B,0B1\n",
        "0UNSHARD,0F0,0RESHARD,0UNSHARD,0R0,0B0,0RESHARD\n",
    ],
)
def test_recomputation_between_forward_and_backward_is_accepted(text: str) -> None:
    schedule = Schedule.from_csv(text)
    schedule.verify()
    assert text == schedule.to_csv()
    simulate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0R0,0F0,0B0\n",
            "rank 0, position 0: 0R0 runs before 0F0\n  >0R0< 0F0 0B0\n"
            "It must follow the forward of the same stage and microbatch. Move it later.",
        ),
        (
            "0F0,0R0,0R0,0B0\n",
            "rank 0, position 2: 0R0 repeats work that is already done\n",
        ),
        (
            "0F0,0I0,0R0,0W0\n",
            "rank 0, position 2: 0R0 runs after the backward that needs it\n  0F0 0I0 >0R0< 0W0\n"
            "It must come before 0I0 or 0B0. Move it earlier, or remove it.",
        ),
        (
            "0F0,0R0\n",
            "rank 0, position 2: 0B0, or 0I0 and 0W0, is missing\n",
        ),
    ],
)
def test_recomputation_elsewhere_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.from_csv(text).verify()


def test_torch_has_no_cell_for_it() -> None:
    schedule = add_comms(Schedule.from_csv(TWO))
    assert schedule == Schedule.from_csv(schedule.to_csv())
    with pytest.raises(ScheduleError, match="0R0 runs a forward again, for which torch has no"):
        schedule.to_csv(has_waits=True)


def test_forward_that_is_recomputed_keeps_its_inputs_only() -> None:
    # In microbatches, inputs count as nothing.
    assert 1.0 == simulate(Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n")).peak_memory
    assert 2.0 == simulate(Schedule.from_csv("0F0,0F1,0R0,0B0,0B1\n")).peak_memory
    table = CostTable.uniform(
        1,
        after_forward=10.0,
        after_input=4.0,
        after_dropping=1.0,
        during_dropping=3.0,
        during_recompute=12.0,
    )
    report = simulate(Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n"), table)
    starts = {point.time: point.held for point in report.memory(0)}  # The last at each time.
    assert {0: 3, 1: 4, 2: 14, 3: 11, 5: 13, 6: 10, 8: 0} == starts
    Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n").verify(costs=table, memory=14)
    with pytest.raises(ScheduleError, match="the rank holds 14, but its memory is 13"):
        Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n").verify(costs=table, memory=13)


def test_recomputation_takes_its_time_and_fills_a_bubble() -> None:
    early = simulate(Schedule.from_csv("0F0,0R0,0B0\n1F0,1B0\n"), COSTS)
    late = simulate(Schedule.from_csv("0F0,0B0\n1F0,1B0\n"), COSTS)
    assert late.makespan == early.makespan  # Rank 0 waits for rank 1 anyway.
    [start] = [a.start for a in early.actions() if isinstance(a.action, Recompute)]
    [end] = [a.end for a in early.actions() if isinstance(a.action, Recompute)]
    assert (2.0, 3.5) == (start, end)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "Interleaved1F1B", "DualPipeV"])
def test_recomputing_all_lowers_the_peak_and_can_be_undone(name: str, p: int, m: int) -> None:
    plain = get(name)(num_ranks=p, num_microbatches=m)
    again = add_recompute(plain)
    again.verify()
    assert plain == remove_recompute(again)
    assert again == add_recompute(again)
    assert again.num_actions == plain.num_actions + plain.num_stages * m
    assert simulate(again).peak_memory <= simulate(plain).peak_memory
    assert keep_forwards(plain).orders == keep_forwards(again).orders


def test_only_some_are_recomputed() -> None:
    plain = get("1F1B")(num_ranks=2, num_microbatches=2)
    some = add_recompute(plain, lambda stage, mb: (stage, mb) == (0, 1))
    assert [Recompute(0, 1)] == [
        action for order in some.orders for action in order if isinstance(action, Recompute)
    ]


def test_schedule_without_backwards_has_nothing_to_recompute() -> None:
    with pytest.raises(ScheduleError, match="has no backwards, so nothing needs to be recomputed"):
        add_recompute(Schedule([[Forward(0, 0)]], Placement.linear(1), 1))


def test_drawing_shows_it() -> None:
    panel = Panel("1F1B", simulate(Schedule.from_csv(TWO), COSTS))
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(terminal([panel], width=100, colour=False))
    assert "R recomputation" in capture.get()
