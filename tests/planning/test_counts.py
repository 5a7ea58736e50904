"""Into how many microbatches a batch may be cut."""

import pytest

from penstock.planning.microbatch_counts import choose_counts, larger_counts


@pytest.mark.parametrize(
    ("batch_size", "num_ranks", "expected"),
    [
        (64, 4, [4, 8, 16, 32]),
        (10, 4, [5, 10]),
        (1, 4, [1]),
        (2, 4, [2]),
        (101, 4, [1, 101]),
        (6, 1, [1, 2, 3, 6]),
        # More than 6 divisors: the ends stay, and those in between are evenly spread.
        (720, 6, [6, 10, 16, 20, 36, 48]),
    ],
)
def test_counts_are_divisors_of_the_batch_size_around_the_number_of_ranks(
    batch_size: int, num_ranks: int, expected: list[int]
) -> None:
    assert expected == choose_counts(batch_size, num_ranks)


def test_there_is_always_a_count_and_each_divides_the_batch() -> None:
    for batch_size in range(1, 200):
        counts = choose_counts(batch_size, 4)
        assert 1 <= len(counts) <= 6
        assert [] == [count for count in counts if batch_size % count]


def test_larger_counts_are_the_divisors_above() -> None:
    assert [12, 18, 36] == larger_counts(36, 9)
    assert [] == larger_counts(36, 36)
