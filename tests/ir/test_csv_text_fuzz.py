"""Malformed texts: each is either read, and round-trips, or rejected with its line and cell."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import examples
from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import add_comms
from penstock.schedules import REGISTRY

PLACE = re.compile(r"line [1-9][0-9]*, cell [1-9][0-9]*: ")

VALID = [
    text
    for generator in REGISTRY
    for schedule in [
        generator(num_ranks=2, num_microbatches=4 if "DualPipe" in generator.name else 2)
    ]
    for text in (schedule.to_csv(), add_comms(schedule).to_csv())
]
VALID += ["0F0,,0F1,,0UNSHARD,0B0\r\n1F0,1REDUCE_GRAD,1B0\r\n", "0F0", "(0F1;0I0)OVERLAP_F_B\n"]

# What a cell is made of, what csv treats in a special way, and what looks like something else.
PIECES = [
    *"0123456789FBIW_;()",
    *["SEND_F", "RECV_B", "OVERLAP_F_B", "UNSHARD", "(0F1;1B0)OVERLAP_F_B", "0F0", "1RECV_F1"],
    *[",", "\n", "\r", "\r\n", '"', '""', " ", "\t", "\x00", "\x0b", "\x1c", "\x85", "\u2028"],
    *["-1", "+1", "1e3", "1_0", "0x1", "9" * 9, "9" * 10, "9" * 5000, "x" * 200_000],
    *["\u0663", "\u00b2", "\uff10", "\U0001d7d8", "\u00bd", "\ufeff", "\ud800", "\u202e", "é"],
]
KINDS = [
    *["insert", "delete", "replace"],
    *["drop cell", "repeat cell", "move cell"],
    *["drop line", "repeat line", "move line"],
]

edits = st.tuples(st.sampled_from(KINDS), st.integers(0, 2**20 - 1), st.sampled_from(PIECES))


def apply_edit(text: str, kind: str, where: int, piece: str) -> str:
    """The text after one edit; `where` stands for two places of up to 1024."""
    first, second = divmod(where, 1024)
    action, _, what = kind.partition(" ")
    if not what:
        at = first % (len(text) + 1)
        width = 0 if action == "insert" else 1 + second % 3
        return text[:at] + ("" if action == "delete" else piece) + text[at + width :]
    if what == "line":
        return "\n".join(_rearrange(text.split("\n"), action, first, second))
    cells = re.split(r"(?<=[,\n])", text)  # Each with what follows it, so that they move anywhere.
    return "".join(_rearrange(cells, action, first, second))


def _rearrange(items: list[str], action: str, first: int, second: int) -> list[str]:
    taken = items[first % len(items)]
    if action != "repeat":
        del items[first % len(items)]
    if action != "drop":
        items.insert(second % (len(items) + 1), taken)
    return items


def check(text: str) -> None:
    try:
        schedule = Schedule.from_csv(text)
    except ScheduleError as exc:
        message = str(exc)
    else:
        check_schedule(schedule)
        return
    assert PLACE.match(message)


def check_schedule(schedule: Schedule) -> None:
    assert schedule == Schedule.from_csv(schedule.to_csv())
    assert repr(schedule).startswith("Schedule(")
    assert schedule.num_ranks == len(str(schedule).splitlines())
    with contextlib.suppress(ScheduleError):
        schedule.verify()


@pytest.mark.fuzz
@examples(700, long=100_000)
@given(st.sampled_from(VALID), st.lists(edits, min_size=1, max_size=3))
def test_edited_text_is_read_or_rejected_with_its_place(
    text: str, edits: list[tuple[str, int, str]]
) -> None:
    for edit in edits:
        text = apply_edit(text, *edit)
    check(text)


@pytest.mark.fuzz
@examples(200, long=20_000)
@given(st.text() | st.text(alphabet='01FBIW,;()"\n\r _', max_size=60))
def test_arbitrary_text_is_read_or_rejected_with_its_place(text: str) -> None:
    check(text)


def test_texts_that_are_edited_are_valid() -> None:
    for text in VALID:
        assert Schedule.from_csv(text) == Schedule.from_csv(Schedule.from_csv(text).to_csv())


def test_each_kind_of_edit_yields_texts_that_are_read_and_texts_that_are_rejected() -> None:
    text = "0F0\n1F0,,1B0\n\n"
    for kind in KINDS:
        outcomes = set()
        for first in range(20):
            for second, piece in ((0, ","), (1, "1"), (7, "F"), (8, "")):
                try:
                    Schedule.from_csv(apply_edit(text, kind, 1024 * first + second, piece))
                    outcomes.add("read")
                except ScheduleError:
                    outcomes.add("rejected")
        assert {"read", "rejected"} == outcomes, kind
