"""What `verify` refuses of gathers, frees and reductions, in full; what it accepts."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Forward, Placement, Schedule, Unshard

NEEDS = (
    "Forwards, recomputations, full and input backwards need the parameters of their stage. "
    "Put 0UNSHARD before it, or move 0RESHARD after it."
)
REDUCED = (
    "The gradients of a stage are reduced at most once in a step, after its last B or W. "
    "Move it after that, or remove it."
)
ACCEPTED = {
    "gathered once": "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n",
    "gathered for each action": "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD\n",
    "freed before a weight backward": "0UNSHARD,0F0,0I0,0RESHARD,0W0,0REDUCE_GRAD\n",
    "left gathered at the end, as torch does": "0UNSHARD,0F0,0B0,0REDUCE_GRAD\n",
    "gathered and not used": "0UNSHARD,0RESHARD,0UNSHARD,0F0,0B0,0RESHARD\n",
    "only one of two stages": "0F0,1UNSHARD,1F0,1B0,1RESHARD,0B0\n",
    "reduced, but not sharded": "0F0,0B0,0REDUCE_GRAD\n",
    "overlap": "0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1,0RESHARD,0REDUCE_GRAD\n",
    "inference": "0UNSHARD,0F0,0RESHARD\n",
}
REJECTED = {
    "recomputation after the free": (
        "0UNSHARD,0F0,0RESHARD,0R0,0UNSHARD,0B0\n",
        "rank 0, position 3: 0R0 runs while stage 0 is not gathered\n"
        f"  0UNSHARD 0F0 0RESHARD >0R0< 0UNSHARD 0B0\n{NEEDS}",
    ),
    "forward before the gather": (
        "0F0,0UNSHARD,0B0\n",
        "rank 0, position 0: 0F0 runs while stage 0 is not gathered\n"
        f"  >0F0< 0UNSHARD 0B0\n{NEEDS}",
    ),
    "full backward after the free": (
        "0UNSHARD,0F0,0RESHARD,0B0\n",
        "rank 0, position 3: 0B0 runs while stage 0 is not gathered\n"
        f"  0UNSHARD 0F0 0RESHARD >0B0<\n{NEEDS}",
    ),
    "input backward after the free": (
        "0UNSHARD,0F0,0RESHARD,0I0,0W0\n",
        "rank 0, position 3: 0I0 runs while stage 0 is not gathered\n"
        f"  0UNSHARD 0F0 0RESHARD >0I0< 0W0\n{NEEDS}",
    ),
    "half of an overlap after the free": (
        "0UNSHARD,1UNSHARD,0F0,1F0,0RESHARD,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1\n",
        "rank 0, position 5: (0F1;1B0)OVERLAP_F_B runs while stage 0 is not gathered\n"
        "  … 1UNSHARD 0F0 1F0 0RESHARD >(0F1;1B0)OVERLAP_F_B< 1F1 0B0 1B1 0B1\n" + NEEDS,
    ),
    "second gather": (
        "0UNSHARD,0F0,0UNSHARD,0B0\n",
        "rank 0, position 2: 0UNSHARD gathers stage 0, which is gathered already\n"
        "  0UNSHARD 0F0 >0UNSHARD< 0B0\nFree it first with 0RESHARD, or remove the gather.",
    ),
    "free before the gather": (
        "0RESHARD,0UNSHARD,0F0,0B0\n",
        "rank 0, position 0: 0RESHARD frees stage 0, which is not gathered\n"
        "  >0RESHARD< 0UNSHARD 0F0 0B0\nGather it first with 0UNSHARD, or remove the free.",
    ),
    "second free": (
        "0UNSHARD,0F0,0B0,0RESHARD,0RESHARD\n",
        "rank 0, position 4: 0RESHARD frees stage 0, which is not gathered\n"
        "  0UNSHARD 0F0 0B0 0RESHARD >0RESHARD<\n"
        "Gather it first with 0UNSHARD, or remove the free.",
    ),
    "second reduction": (
        "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n",
        "rank 0, position 3: 0REDUCE_GRAD repeats a reduction that is already done\n"
        f"  0F0 0B0 0REDUCE_GRAD >0REDUCE_GRAD<\n{REDUCED}",
    ),
    "reduction before the last weight backward": (
        "0F0,0I0,0REDUCE_GRAD,0W0\n",
        "rank 0, position 2: 0REDUCE_GRAD runs before 0W0\n"
        f"  0F0 0I0 >0REDUCE_GRAD< 0W0\n{REDUCED}",
    ),
    "reduction in inference": (
        "0F0,0REDUCE_GRAD\n",
        "rank 0, position 1: 0REDUCE_GRAD has no gradients to reduce\n"
        f"  0F0 >0REDUCE_GRAD<\n{REDUCED}",
    ),
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=list(ACCEPTED))
def test_schedule_that_gathers_what_it_needs_is_accepted(text: str) -> None:
    Schedule.from_csv(text).verify()


@pytest.mark.parametrize(("text", "message"), REJECTED.values(), ids=list(REJECTED))
def test_schedule_that_breaks_a_rule_is_rejected_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text).verify()
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("stage", "wrong"),
    [(1, "1UNSHARD is of stage 1, which is on rank 1"), (2, "which does not exist")],
)
def test_gather_of_a_stage_that_the_rank_does_not_hold_is_rejected(stage: int, wrong: str) -> None:
    schedule = Schedule([[Unshard(stage), Forward(0, 0)], [Forward(1, 0)]], Placement.linear(2), 1)
    with pytest.raises(ScheduleError, match=wrong):
        schedule.verify()
    assert "rank 0" in str(schedule)
