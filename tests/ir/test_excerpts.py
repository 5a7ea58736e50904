"""How error messages show a place in an order."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Forward
from penstock.ir.excerpts import error_at, excerpt, locate

TWELVE = [Forward(0, mb) for mb in range(12)]


@pytest.mark.parametrize(
    ("count", "position", "shown"),
    [
        (0, 0, ">end<"),
        (5, 0, ">0F0< 0F1 0F2 0F3 0F4"),
        (6, 0, ">0F0< 0F1 0F2 0F3 0F4 …"),
        (9, 4, "0F0 0F1 0F2 0F3 >0F4< 0F5 0F6 0F7 0F8"),
        (12, 6, "… 0F2 0F3 0F4 0F5 >0F6< 0F7 0F8 0F9 0F10 …"),
        (12, 12, "… 0F8 0F9 0F10 0F11 >end<"),
    ],
)
def test_excerpt_marks_the_position_and_shows_four_on_each_side(
    count: int, position: int, shown: str
) -> None:
    assert shown == excerpt(TWELVE[:count], position)


def test_error_says_where_what_and_what_to_do() -> None:
    error = error_at([[], TWELVE[:2]], 1, 0, "what is wrong", "What to do.")
    assert isinstance(error, ScheduleError)
    assert "rank 1, position 0: what is wrong\n  >0F0< 0F1\nWhat to do." == str(error)


def test_place_is_counted_from_zero() -> None:
    assert "rank 0, position 3" == locate(0, 3)
