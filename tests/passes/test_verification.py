"""What `verify` refuses of forwards and backwards, in full; what it accepts."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Overlap,
    Placement,
    Recv,
    Schedule,
    Send,
)
from penstock.passes import add_comms, verify
from penstock.schedules import get

ONCE = (
    "Each forward, input backward and weight backward must occur once; "
    "a full backward counts as both halves. Remove one."
)
HOLDER = "An action must be on the rank that holds its stage. Move it, or change the placement."


def follow(kind: str) -> str:
    return f"It must follow the {kind} of the same stage and microbatch. Move it later."


def complete(count: int) -> str:
    return (
        f"Every stage needs a forward for each of the {count} microbatches and, "
        "if the schedule has backwards, B, or I and W. Add it."
    )


def error_of(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    return str(caught.value)


ACCEPTED = {
    "one microbatch": "0F0,0B0\n",
    "1F1B": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "split backward": "0F0,0I0,0W0\n1F0,1I0,1W0\n",
    "late weight backwards": "0F0,0F1,0I0,0I1,0W1,0W0\n",
    "split for some microbatches": "0F0,0F1,0B0,0I1,0W1\n",
    "backwards in another order": "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n",
    "overlap": "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
    "overlap of an input backward": "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n",
    "V placement": "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",
    "inference": "0F0,0F1\n1F0,1F1\n",
    "inference with communication": "0F0,0SEND_F0\n1RECV_F0,1F0\n",
    "stages against the ranks": "1F0,1B0\n0F0,0B0\n",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=list(ACCEPTED))
def test_schedule_that_can_be_run_is_accepted(text: str) -> None:
    assert Schedule.from_csv(text).verify() is None


REJECTED = {
    "overlap of one microbatch": (
        "0F0,0F1,(0F2;0B2)OVERLAP_F_B\n",
        "rank 0, position 2: (0F2;0B2)OVERLAP_F_B overlaps a forward and a backward "
        "of microbatch 2\n"
        "  0F0 0F1 >(0F2;0B2)OVERLAP_F_B<\n"
        "The backward needs that forward to be done. Overlap two microbatches.",
    ),
    "second forward": (
        "0F0,0B0\n1F0,1F0,1B0\n",
        f"rank 1, position 1: 1F0 repeats work that is already done\n  1F0 >1F0< 1B0\n{ONCE}",
    ),
    "second backward": (
        "0F0,0B0,0B0\n",
        f"rank 0, position 2: 0B0 repeats work that is already done\n  0F0 0B0 >0B0<\n{ONCE}",
    ),
    "second input backward": (
        "0F0,0I0,0I0,0W0\n",
        f"rank 0, position 2: 0I0 repeats work that is already done\n  0F0 0I0 >0I0< 0W0\n{ONCE}",
    ),
    "second weight backward": (
        "0F0,0I0,0W0,0W0\n",
        f"rank 0, position 3: 0W0 repeats work that is already done\n  0F0 0I0 0W0 >0W0<\n{ONCE}",
    ),
    "input backward after a full one": (
        "0F0,0B0,0I0\n",
        f"rank 0, position 2: 0I0 repeats work that is already done\n  0F0 0B0 >0I0<\n{ONCE}",
    ),
    "weight backward after a full one": (
        "0F0,0B0,0W0\n",
        f"rank 0, position 2: 0W0 repeats work that is already done\n  0F0 0B0 >0W0<\n{ONCE}",
    ),
    "full backward after an input one": (
        "0F0,0I0,0B0\n",
        f"rank 0, position 2: 0B0 repeats work that is already done\n  0F0 0I0 >0B0<\n{ONCE}",
    ),
    "backward repeated in an overlap": (
        "0F0,0B0,(0F1;0B0)OVERLAP_F_B,0B1\n",
        "rank 0, position 2: 0B0 repeats work that is already done\n"
        f"  0F0 0B0 >(0F1;0B0)OVERLAP_F_B< 0B1\n{ONCE}",
    ),
    "backward before its forward": (
        "0F0,0B1,0F1,0B0\n",
        f"rank 0, position 1: 0B1 runs before 0F1\n  0F0 >0B1< 0F1 0B0\n{follow('forward')}",
    ),
    "input backward before its forward": (
        "0I0,0F0,0W0\n",
        f"rank 0, position 0: 0I0 runs before 0F0\n  >0I0< 0F0 0W0\n{follow('forward')}",
    ),
    "weight backward before its input backward": (
        "0F0,0F1,0I1,0W0,0I0,0W1\n",
        "rank 0, position 3: 0W0 runs before 0I0\n"
        f"  0F0 0F1 0I1 >0W0< 0I0 0W1\n{follow('input backward')}",
    ),
    "backward before its forward in an overlap": (
        "0F1,(0F2;0B0)OVERLAP_F_B,0F0\n",
        "rank 0, position 1: 0B0 runs before 0F0\n"
        f"  0F1 >(0F2;0B0)OVERLAP_F_B< 0F0\n{follow('forward')}",
    ),
    "missing forward": (
        "0F0,0F1\n1F1\n",
        f"rank 1, position 1: 1F0 is missing\n  1F1 >end<\n{complete(2)}",
    ),
    "missing backward": (
        "0F0,0F1,0B0\n",
        f"rank 0, position 3: 0B1, or 0I1 and 0W1, is missing\n  0F0 0F1 0B0 >end<\n{complete(2)}",
    ),
    "backward missing on a whole rank": (
        "0F0\n1F0,1B0\n",
        f"rank 0, position 1: 0B0, or 0I0 and 0W0, is missing\n  0F0 >end<\n{complete(1)}",
    ),
    "missing backward of a stage behind the last rank": (
        "0F0,3F0,3B0,0B0\n1F0,2F0,1B0\n",
        f"rank 1, position 3: 2B0, or 2I0 and 2W0, is missing\n  1F0 2F0 1B0 >end<\n{complete(1)}",
    ),
    "missing weight backward": (
        "0F0,0I0\n",
        f"rank 0, position 2: 0W0 is missing\n  0F0 0I0 >end<\n{complete(1)}",
    ),
    "circle": (
        "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n2F1,2B1,2F0,2B0\n",
        "rank 1, position 1: 1B0 waits forever\n"
        "  rank 1: 1F0 >1B0< 1F1 1B1\n"
        "    waits for the gradient of microbatch 0 from stage 2 on rank 2\n"
        "  rank 2: >2F1< 2B1 2F0 2B0\n"
        "    waits for the activation of microbatch 1 from stage 1 on rank 1\n"
        "Ranks must not wait for each other in a circle. "
        "Move a marked action after those that the other ranks wait for.",
    ),
}


@pytest.mark.parametrize(("text", "message"), REJECTED.values(), ids=list(REJECTED))
def test_schedule_that_breaks_a_rule_is_rejected_with_the_place(text: str, message: str) -> None:
    assert message == error_of(Schedule.from_csv(text))


NO_STAGE = "The placement has stages 0 to 1."
NO_MICROBATCH = "The schedule has microbatches 0 to 2."


@pytest.mark.parametrize(
    ("action", "wrong", "rule"),
    [
        (Forward(2, 0), "2F0 is of stage 2, which does not exist", NO_STAGE),
        (Backward(-1, 0), "-1B0 is of stage -1, which does not exist", NO_STAGE),
        (Forward(0, 3), "0F3 is of microbatch 3, which does not exist", NO_MICROBATCH),
        (BackwardWeight(0, -1), "0W-1 is of microbatch -1, which does not exist", NO_MICROBATCH),
        (BackwardInput(1, 0), "1I0 is of stage 1, which is on rank 1", HOLDER),
        (Overlap(Forward(0, 1), Backward(1, 0)), "1B0 is of stage 1, which is on rank 1", HOLDER),
        (Send(Message(2, 3, 0)), "2SEND_F0 is of stage 2, which does not exist", NO_STAGE),
        (
            Recv(Message(-1, 0, 3)),
            "0RECV_F3 is of microbatch 3, which does not exist",
            NO_MICROBATCH,
        ),
        (Send(Message(1, 2, 0)), "1SEND_F0 is of stage 1, which is on rank 1", HOLDER),
    ],
    ids=str,
)
def test_action_out_of_place_is_rejected(action: Action, wrong: str, rule: str) -> None:
    schedule = Schedule([[Forward(0, 0), action], [Forward(1, 0)]], Placement.linear(2), 3)
    assert f"rank 0, position 1: {wrong}\n  0F0 >{action}<\n{rule}" == error_of(schedule)


def test_rank_without_actions_is_rejected() -> None:
    schedule = Schedule([[Forward(0, 0)], []], Placement.linear(2), 1)
    assert error_of(schedule).startswith("rank 1, position 0: 1F0 is missing\n  >end<\n")


def test_empty_schedule_of_a_billion_microbatches_is_rejected_at_once() -> None:
    schedule = Schedule([[]], Placement.linear(1), 10**9)
    assert error_of(schedule).startswith("rank 0, position 0: 0F0 is missing\n  >end<\n")


def test_rank_that_waits_for_itself_is_rejected() -> None:
    schedule = Schedule.from_csv("0F0,1F0,0B0,1B0\n")
    assert error_of(schedule).startswith("rank 0, position 2: 0B0 waits forever\n")


def test_excerpt_shows_four_actions_on_each_side_of_the_culprit() -> None:
    cells = [f"0F{mb}" for mb in range(12)]
    cells[6] = "0B9"
    schedule = Schedule.from_csv(",".join(cells))
    assert "\n  … 0F2 0F3 0F4 0F5 >0B9< 0F7 0F8 0F9 0F10 …\n" in error_of(schedule)


def count_calls(function: Callable[[], None]) -> int:
    """How many calls `function` leads to; the benchmark of the simulator measures the time."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("with_comms", [False, True])
@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_work_is_linear_in_the_actions(name: str, with_comms: bool) -> None:
    def make(p: int, m: int) -> Schedule:
        schedule = get(name)(num_ranks=p, num_microbatches=m)
        return add_comms(schedule) if with_comms else schedule

    for small, large in [(make(4, 16), make(4, 64)), (make(4, 32), make(16, 32))]:
        calls = [count_calls(schedule.verify) for schedule in (small, large)]
        assert calls[1] / calls[0] <= 1.1 * large.num_actions / small.num_actions
