"""The shape of a schedule that is given by its name, as a value, or as "auto"."""

import pytest

from penstock import schedules
from penstock.ir import Placement
from penstock.schedules.given_shape import Mismatch, find_mismatch, is_auto, placement_of_auto


def test_auto_is_a_name_in_any_case() -> None:
    assert [True, True, False, False] == list(map(is_auto, ["auto", "Auto", "ZB-V", None]))


@pytest.mark.parametrize(("given", "found"), [(None, 2), (1, 1), (3, 3)])
def test_auto_places_stages_in_a_v(given: int | None, found: int) -> None:
    assert Placement.v(2, stages_per_rank=found) == placement_of_auto(2, given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((2, 8, 1), None),
        ((2, None, None), None),
        ((3, 4, 2), Mismatch("num_ranks", 3, 2)),
        ((2, 4, 2), Mismatch("num_microbatches", 4, 8)),
        ((2, None, 2), Mismatch("stages_per_rank", 2, 1)),
    ],
)
def test_first_number_that_a_schedule_is_not_for_is_found(
    given: tuple[int, int | None, int | None], expected: Mismatch | None
) -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=8)
    ranks, microbatches, stages = given
    found = find_mismatch(
        schedule, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages
    )
    assert expected == found
