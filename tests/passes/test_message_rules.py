"""What `verify` refuses of sends and receives, in full; what it accepts."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import verify

NOTHING_TO_SEND = (
    "A send must follow the action whose result another rank needs, and occur once. "
    "Move it after that action, or remove it."
)
ALL_OF_THEM = (
    "A schedule with sends and receives needs all of them. "
    "Add it, or remove them all with remove_comms and add them with add_comms."
)
NOTHING_TO_RECEIVE = "A receive must be for a message from another rank, and occur once. Remove it."
RECEIVE_FIRST = (
    "A message from another rank must be received first. Add the receive, or move it earlier."
)
RECEIVE_IN_VAIN = (
    "A receive must come before the action that needs the other rank's message, "
    "and occur once. Remove it."
)
# What rank 0 and rank 1 of a full step do.
FIRST = "0F0,0SEND_F0,0RECV_B0,0B0\n"
SECOND = "1RECV_F0,1F0,1B0,1SEND_B0\n"

REJECTED = {
    "send before its action": (
        "0SEND_F0,0F0,0RECV_B0,0B0\n" + SECOND,
        "rank 0, position 0: 0SEND_F0 has nothing to send\n"
        f"  >0SEND_F0< 0F0 0RECV_B0 0B0\n{NOTHING_TO_SEND}",
    ),
    "second send": (
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n" + SECOND,
        "rank 0, position 2: 0SEND_F0 has nothing to send\n"
        f"  0F0 0SEND_F0 >0SEND_F0< 0RECV_B0 0B0\n{NOTHING_TO_SEND}",
    ),
    "send beyond the last stage": (
        FIRST + "1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n",
        "rank 1, position 2: 1SEND_F0 has nothing to send\n"
        f"  1RECV_F0 1F0 >1SEND_F0< 1B0 1SEND_B0\n{NOTHING_TO_SEND}",
    ),
    "send between stages of one rank": (
        "0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0,2F0\n",
        "rank 1, position 2: 1SEND_F0 has nothing to send\n"
        f"  1RECV_F0 1F0 >1SEND_F0< 2F0\n{NOTHING_TO_SEND}",
    ),
    "send on a single rank": (
        "0F0,0SEND_F0\n",
        f"rank 0, position 1: 0SEND_F0 has nothing to send\n  0F0 >0SEND_F0<\n{NOTHING_TO_SEND}",
    ),
    "missing send of an activation": (
        "0F0,0RECV_B0,0B0\n" + SECOND,
        "rank 0, position 0: 0SEND_F0 is missing after 0F0\n"
        f"  >0F0< 0RECV_B0 0B0\n{ALL_OF_THEM}",
    ),
    "missing send of a gradient": (
        FIRST + "1RECV_F0,1F0,1I0,1W0\n",
        "rank 1, position 2: 1SEND_B0 is missing after 1I0\n"
        f"  1RECV_F0 1F0 >1I0< 1W0\n{ALL_OF_THEM}",
    ),
    "missing send of an overlap": (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1B1,1SEND_B1\n",
        "rank 1, position 3: 1SEND_B0 is missing after (1F1;1B0)OVERLAP_F_B\n"
        f"  1RECV_F0 1F0 1RECV_F1 >(1F1;1B0)OVERLAP_F_B< 1B1 1SEND_B1\n{ALL_OF_THEM}",
    ),
    "missing receive of an activation": (
        FIRST + "1F0,1B0,1SEND_B0\n",
        "rank 1, position 0: 1F0 runs before 1RECV_F0\n"
        f"  >1F0< 1B0 1SEND_B0\n{RECEIVE_FIRST}",
    ),
    "receive of a gradient behind its use": (
        "0F0,0SEND_F0,0B0,0RECV_B0\n" + SECOND,
        "rank 0, position 2: 0B0 runs before 0RECV_B0\n"
        f"  0F0 0SEND_F0 >0B0< 0RECV_B0\n{RECEIVE_FIRST}",
    ),
    "second receive before the use": (
        FIRST + "1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0\n",
        "rank 1, position 1: 1RECV_F0 has nothing to receive\n"
        f"  1RECV_F0 >1RECV_F0< 1F0 1B0 1SEND_B0\n{NOTHING_TO_RECEIVE}",
    ),
    "receive before the first stage": (
        "0RECV_F0,0F0,0SEND_F0,0RECV_B0,0B0\n" + SECOND,
        "rank 0, position 0: 0RECV_F0 has nothing to receive\n"
        f"  >0RECV_F0< 0F0 0SEND_F0 0RECV_B0 0B0\n{NOTHING_TO_RECEIVE}",
    ),
    "second receive behind the use": (
        FIRST + "1RECV_F0,1F0,1RECV_F0,1B0,1SEND_B0\n",
        "rank 1, position 2: 1RECV_F0 receives a message that no later action needs\n"
        f"  1RECV_F0 1F0 >1RECV_F0< 1B0 1SEND_B0\n{RECEIVE_IN_VAIN}",
    ),
    "receive between stages of one rank": (
        "0F0,0SEND_F0\n1RECV_F0,1F0,2RECV_F0,2F0\n",
        "rank 1, position 2: 2RECV_F0 receives a message that no later action needs\n"
        f"  1RECV_F0 1F0 >2RECV_F0< 2F0\n{RECEIVE_IN_VAIN}",
    ),
    "receive of a gradient without backwards": (
        "0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0\n",
        "rank 0, position 2: 0RECV_B0 receives a message that no later action needs\n"
        f"  0F0 0SEND_F0 >0RECV_B0<\n{RECEIVE_IN_VAIN}",
    ),
    "receives in another order than the sends": (
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n",
        "rank 1, position 0: 1RECV_F1 comes where rank 0 runs 0SEND_F0\n"
        "  >1RECV_F1< 1RECV_F0 1F0 1F1\n"
        "Messages from one rank to another arrive in the order in which they are sent. "
        "Put 1RECV_F0 first, or send in the order of the receives.",
    ),
    "activations and gradients that share a channel": (
        # Of the three stages the middle one is on rank 1, so rank 0 sends it both.
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2B0,2SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1,"
        "0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1RECV_F1,1F1,1SEND_F1,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1\n",
        "rank 1, position 3: 1RECV_B0 comes where rank 0 runs 0SEND_F1\n"
        "  1RECV_F0 1F0 1SEND_F0 >1RECV_B0< 1RECV_F1 1F1 1SEND_F1 1B0 …\n"
        "Messages from one rank to another arrive in the order in which they are sent. "
        "Put 1RECV_F1 first, or send in the order of the receives.",
    ),
    "circle through a late send": (
        "0F0,0SEND_F0,0F1,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
        "rank 0, position 4: 0B0 waits forever\n"
        "  rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 >0B0< 0SEND_F1 0RECV_B1 0B1\n"
        "    waits for the gradient of microbatch 0 from stage 1 on rank 1\n"
        "  rank 1: 1RECV_F0 1RECV_F1 1F0 >1F1< 1B0 1SEND_B0 1B1 1SEND_B1\n"
        "    waits for the activation of microbatch 1 from stage 0 on rank 0\n"
        "Ranks must not wait for each other in a circle. "
        "Move a marked action after those that the other ranks wait for.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REJECTED.values(), ids=list(REJECTED))
def test_communication_that_breaks_a_rule_is_rejected_with_the_place(
    text: str, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_csv(text))
    assert message == str(caught.value)


ACCEPTED = {
    "as add_comms places it": FIRST + SECOND,
    "receives posted early": (
        "0RECV_B0,0F0,0SEND_F0,0RECV_B1,0F1,0SEND_F1,0B0,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    ),
    "send behind another action": (
        "0F0,0F1,0SEND_F0,0SEND_F1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1\n"
    ),
    "send of an input backward behind its weight backward": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1I0,1W0,1SEND_B0\n"
    ),
    "messages in another order than the microbatches": (
        "0F0,0F1,0SEND_F1,0SEND_F0\n"
        "1RECV_F1,1RECV_F0,1F0,1F1\n"
    ),
    "another order on each channel": (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=list(ACCEPTED))
def test_communication_that_can_be_run_is_accepted(text: str) -> None:
    assert Schedule.from_csv(text).verify() is None
