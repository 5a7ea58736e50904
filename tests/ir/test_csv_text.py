"""The text format both ways, what is dropped on reading, and every error with line and cell."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Overlap,
    Placement,
    Recv,
    ReduceGrads,
    Reshard,
    Schedule,
    Send,
    Unshard,
)

EXPECTED = (
    "Expected a cell like 0F1 (stage, kind, microbatch), where kind is one of "
    "F, B, I, W, R, SEND_F, RECV_F, SEND_B, RECV_B; or a pair like (0F2;3B1)OVERLAP_F_B; "
    "or a stage and one of UNSHARD, RESHARD, REDUCE_GRAD; or an empty cell."
)
PLAIN = Schedule(
    [[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), BackwardInput(1, 0), BackwardWeight(1, 0)]],
    Placement.linear(2),
    1,
)
PLAIN_TEXT = "0F0,0B0\n1F0,1I0,1W0\n"


def error_of(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text)
    return str(caught.value)


def test_computes_are_written_and_read() -> None:
    assert PLAIN_TEXT == PLAIN.to_csv()
    assert PLAIN == Schedule.from_csv(PLAIN_TEXT)


def test_communication_is_written_and_read() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    schedule = Schedule(
        [
            [Forward(0, 0), Send(Message(0, 1, 0)), Recv(Message(1, 0, 0)), Backward(0, 0)],
            [Recv(Message(0, 1, 0)), Forward(1, 0), Backward(1, 0), Send(Message(1, 0, 0))],
        ],
        Placement.linear(2),
        1,
    )
    assert text == schedule.to_csv()
    assert schedule == Schedule.from_csv(text)


@pytest.mark.parametrize("kind", [Backward, BackwardInput])
def test_overlaps_are_written_and_read(kind: type) -> None:
    schedule = Schedule([[Overlap(Forward(1, 12), kind(0, 3))]], Placement([0, 0]), 13)
    letter = "B" if kind is Backward else "I"
    assert f"(1F12;0{letter}3)OVERLAP_F_B\n" == schedule.to_csv()
    assert schedule == Schedule.from_csv(schedule.to_csv())


@pytest.mark.parametrize(
    ("text", "ranks", "num_microbatches"),
    [
        ("0F0,1F4\n", (0, 0), 5),
        ("1F0\n0F0\n", (1, 0), 1),
        ("0F0,3F0\n1F0,2F0\n", (0, 1, 1, 0), 1),
        ("(1F2;0B6)OVERLAP_F_B\n", (0, 0), 7),
        ("(1F6;0B2)OVERLAP_F_B\n", (0, 0), 7),
        ("0RECV_B3\n1SEND_B3\n", (0, 1), 4),
    ],
)
def test_placement_and_number_of_microbatches_follow_from_the_cells(
    text: str, ranks: tuple[int, ...], num_microbatches: int
) -> None:
    schedule = Schedule.from_csv(text)
    assert ranks == schedule.placement.ranks
    assert num_microbatches == schedule.num_microbatches
    assert text == schedule.to_csv()


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0\n1F0,1I0,1W0",
        "0F0,0B0\r1F0,1I0,1W0\r",
        "0F0,0B0\n1F0,1I0,1W0\n\n\n",
        "0F0,0B0\r\n1F0,1I0,1W0\r\n\r\n",
        ",0F0,,,0B0\n,,1F0,1I0,1W0,,\n",
        " 0F0 ,\t0B0\n1F0, 1I0  ,   ,1W0 \n",
        '"0F0",0B0\n1F0,"1I0",1W0\n',
        "\ufeff0F0,0B0\n1F0,1I0,1W0\n",
        "00F0,0B000\n01F0,1I0,1W0\n",
    ],
    ids=[
        "no last newline",
        "CR",
        "empty lines at the end",
        "empty CRLF lines at the end",
        "idle cells",
        "spaces",
        "quotes",
        "byte order mark",
        "leading zeros",
    ],
)
def test_same_orders_are_read_whatever_the_writer_did(text: str) -> None:
    assert PLAIN == Schedule.from_csv(text)


WITH_COMMS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0RECV_B1,(2F0;0B1)OVERLAP_F_B,0W0,0REDUCE_GRAD\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
)
WITH_WAITS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0WAIT_SEND_F0,0RECV_B1,(2F0;0B1)OVERLAP_F_B,"
    "0WAIT_SEND_F1,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
)


def test_waits_of_torch_are_written_if_asked_for_and_dropped_on_reading() -> None:
    schedule = Schedule.from_csv(WITH_COMMS)
    assert WITH_COMMS == schedule.to_csv()
    assert WITH_WAITS == schedule.to_csv(has_waits=True)
    assert schedule == Schedule.from_csv(WITH_WAITS)


@pytest.mark.parametrize(
    ("line", "cell", "wait", "awaited"),
    [
        ("0F0,0WAIT_SEND_F0,0SEND_F0,0B0", 2, "0WAIT_SEND_F0", "0SEND_F0"),
        ("0F0,0SEND_F0,0WAIT_SEND_F0,0WAIT_SEND_F0,0B0", 4, "0WAIT_SEND_F0", "0SEND_F0"),
        ("0F0,0SEND_F0,0WAIT_SEND_F1,0B0", 3, "0WAIT_SEND_F1", "0SEND_F1"),
        ("0F0,0SEND_F0,0B0,0WAIT_REDUCE_GRAD", 4, "0WAIT_REDUCE_GRAD", "0REDUCE_GRAD"),
    ],
)
def test_wait_for_what_was_not_started_is_rejected(
    line: str, cell: int, wait: str, awaited: str
) -> None:
    expected = f"line 1, cell {cell}: {wait} waits for {awaited}, which has not been started"
    assert error_of(f"{line}\n1F0,1B0\n").startswith(expected)


def test_wait_for_a_message_that_skips_stages_cannot_be_written() -> None:
    schedule = Schedule.from_csv("0F0,0SEND_F0>2\n1F0\n2RECV_F0<0,2F0\n")
    with pytest.raises(ScheduleError, match="0SEND_F0>2 skips stages, for which torch has no cell"):
        schedule.to_csv(has_waits=True)


def test_spaces_in_an_overlap_do_not_matter() -> None:
    assert Schedule.from_csv("(0F1;0B0)OVERLAP_F_B") == Schedule.from_csv(
        " ( 0F1 ; 0B0 )OVERLAP_F_B "
    )


def test_largest_number_has_nine_digits() -> None:
    assert 10**9 == Schedule.from_csv("0F999999999").num_microbatches


@pytest.mark.parametrize(
    "cell",
    [
        "F0",
        "0F",
        "0X0",
        "0f0",
        "0F0x",
        "0 F0",
        "0F-1",
        "0F1000000000",
        "0F٣",
        "0SEND_F",
        "0UNSHARD0",
        "0WAIT_REDUCE_GRAD0",
        "0WAIT_SEND_F",
        "0WAIT_RECV_F0",
        "\ufeff0F0",
        "0F0\x00",
        "(0F0;0B1)",
        "(0F0;0W1)OVERLAP_F_B",
        "(0B1;0F0)OVERLAP_F_B",
        "(0F0;0B1;0B2)OVERLAP_F_B",
        "((0F0;0B1)OVERLAP_F_B;0B1)OVERLAP_F_B",
    ],
)
def test_cell_that_is_no_action_is_rejected_with_its_place(cell: str) -> None:
    text = f"0F0,0F1\n1F0,,{cell},1F1\n"
    assert f"line 2, cell 3: {cell!r} is not an action.\n{EXPECTED}" == error_of(text)


def test_long_cell_is_cut_short_in_the_message() -> None:
    shown = "x" * 40
    assert f"line 1, cell 1: {shown!r} is not an action.\n{EXPECTED}" == error_of(shown)
    cut = shown + "…"
    assert f"line 1, cell 1: {cut!r} is not an action.\n{EXPECTED}" == error_of(shown + "x" * 1000)


def test_field_that_csv_cannot_hold_is_rejected_with_its_line() -> None:
    assert (
        "line 2, cell 1: the line cannot be read: field larger than field limit (131072).\n"
        f"{EXPECTED}"
    ) == error_of("0F0\n" + "1" * 200_000 + "\n1F0\n")


@pytest.mark.parametrize("text", ["", "\r\n\r\n"])
def test_empty_text_is_rejected(text: str) -> None:
    assert (
        "line 1, cell 1: the text is empty.\nExpected one line of actions for each rank."
    ) == error_of(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (",,\n0F0\n", 1),
        (" ", 1),
    ],
)
def test_line_without_actions_is_rejected(text: str, line: int) -> None:
    assert (
        f"line {line}, cell 1: the line has no action.\nEvery rank holds a stage: remove the line."
    ) == error_of(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,,0B0\n",
            "line 2, cell 3: 0B0 is on rank 1, but 0F0 of the same stage is on rank 0.\n"
            "All actions of a stage are on one rank: keep stage 0 on one line.",
        ),
        (
            "0F0\n1F0\n2F0,(2F1;1B0)OVERLAP_F_B\n",
            "line 3, cell 2: (2F1;1B0)OVERLAP_F_B is on rank 2, "
            "but 1F0 of the same stage is on rank 1.\n"
            "All actions of a stage are on one rank: keep stage 1 on one line.",
        ),
    ],
)
def test_stage_on_two_lines_is_rejected(text: str, message: str) -> None:
    assert message == error_of(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F0\n", "line 1, cell 1: 1F0 is of stage 1, but stage 0 is not on any line."),
        (
            "0F0\n2F0\n999999999F7,999999999UNSHARD\n",
            "line 3, cell 1: 999999999F7 is of stage 999999999, but stage 1 is not on any line.",
        ),
        (
            "0F0\n2UNSHARD\n",
            "line 2, cell 1: 2UNSHARD is of stage 2, but stage 1 is not on any line.",
        ),
        (
            "0F0,(0F1;2B0)OVERLAP_F_B\n",
            "line 1, cell 2: (0F1;2B0)OVERLAP_F_B is of stage 2, but stage 1 is not on any line.",
        ),
    ],
)
def test_stage_that_is_left_out_is_rejected(text: str, message: str) -> None:
    assert (
        f"{message}\nStages are numbered from 0 along the data path: leave no number out."
    ) == error_of(text)


def test_stage_of_a_gather_on_two_lines_is_rejected() -> None:
    assert error_of("0F0,0B0\n1F0,0UNSHARD\n").startswith(
        "line 2, cell 2: 0UNSHARD is on rank 1, but 0F0 of the same stage is on rank 0."
    )


def test_gathers_frees_and_reductions_are_read_in_their_places() -> None:
    text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n1UNSHARD,1F0, 1RESHARD ,1I0,1W0,1REDUCE_GRAD\n"
    read = Schedule.from_csv(text)
    assert text.replace(" ", "") == read.to_csv()
    assert read.has_sharding
    assert 1 == read.num_microbatches
    assert (Unshard(1), Forward(1, 0), Reshard(1)) == read.orders[1][:3]
    assert ReduceGrads(0) == read.orders[0][-1]
    assert not Schedule.from_csv("0F0,0B0\n").has_sharding


def test_first_of_several_faults_is_reported() -> None:
    assert error_of("0F0,y,z\n,x\n").startswith("line 1, cell 2: 'y' is not an action.")


def test_quote_that_stays_open_does_not_join_two_ranks() -> None:
    assert error_of('0F0,"\n1F0\n').startswith("line 1, cell 2: ")
