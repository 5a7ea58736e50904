"""Documents are packed into microbatches of about the same work."""

import re
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from penstock import pack
from penstock.costs import Work
from penstock.errors import CostError, MicrobatchError

SQUARES = Work(per_token=0, per_square=1)


def works(lengths: Sequence[float], found: list[list[int]], work: Work) -> list[float]:
    return [sum(work(lengths[index]) for index in microbatch) for microbatch in found]


def best_of_all(lengths: Sequence[int], count: int, work: Work, cap: float) -> float | None:
    """The least possible work of the microbatch with the most, by trying everything."""
    found = []
    for chosen in product(range(count), repeat=len(lengths)):
        bins = [[n for n, place in enumerate(chosen) if place == b] for b in range(count)]
        if all(bins) and all(sum(lengths[n] for n in one) <= cap for one in bins):
            found.append(max(works(lengths, bins, work)))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_most_work_is_near_the_least_possible(seed: int) -> None:
    random = Random(seed)
    lengths = [random.randint(1, 20) for _ in range(7)]
    work, cap = random.choice([Work(), SQUARES, Work(1, 0.1)]), random.choice([1000, 30, 26])
    best = best_of_all(lengths, 3, work, cap)
    if best is not None:
        found = pack(lengths, 3, work=work, most_tokens=cap)
        assert sorted(range(7)) == sorted(n for one in found for n in one)
        assert all(sum(lengths[n] for n in one) <= cap for one in found)
        assert best <= max(works(lengths, found, work)) <= best * 1.12


def test_large_batch_is_balanced_to_a_thousandth_by_work_and_not_by_tokens() -> None:
    random = Random(0)
    lengths = [min(8192, 16 + int(random.lognormvariate(6.5, 1))) for _ in range(256)]
    work = Work.of_transformer(512)
    mean = sum(map(work, lengths)) / 16
    assert max(works(lengths, pack(lengths, 16, work=work), work)) < 1.001 * mean
    assert max(works(lengths, pack(lengths, 16), work)) > 1.1 * mean


def test_documents_move_where_placing_the_largest_first_is_not_the_best() -> None:
    """Placed by size alone: 5+4+3 and 5+4+... leaves 14 and 10 of 24."""
    lengths = [5, 5, 4, 4, 3, 3]
    assert [12.0, 12.0] == works(lengths, pack(lengths, 2), Work())
    assert [9.0, 9.0] == works([5, 4, 3, 3, 3], pack([5, 4, 3, 3, 3], 2), Work())


def test_cap_that_needs_full_microbatches_is_kept() -> None:
    """By work alone, 6 and 5 would each be with a 3, and the last 4 would not fit."""
    found = pack([6, 5, 4, 3, 2], 2, most_tokens=10)
    assert [10, 10] == works([6, 5, 4, 3, 2], found, Work())


def test_same_lengths_give_the_same_microbatches() -> None:
    lengths = [3, 3, 3, 2, 2, 2, 1, 1]
    assert pack(lengths, 3) == pack(iter(lengths), 3)


@pytest.mark.parametrize(
    ("lengths", "count", "options", "message"),
    [
        (5, 1, {}, "lengths is 5. Expected one length per document."),
        ("55", 1, {}, "lengths is '55'. Expected one length per document."),
        (b"55", 1, {}, "lengths is b'55'. Expected one length per document."),
        ([1, 2], 0, {}, "num_microbatches is 0. Expected a whole number, at least 1."),
        (
            [1, 2],
            3,
            {},
            "The number of documents is 2, but there are 3 microbatches. Expected",
        ),
        ([1, 9], 1, {"most_tokens": 8}, "lengths[1] is 9, but most_tokens is 8. Raise it, or cut"),
        ([1, 2], 1, {"work": max}, "work is <built-in function max>. Expected a penstock.costs."),
        (
            [5, 5, 5],
            2,
            {"most_tokens": 9},
            "3 documents with 15 tokens in all did not fit into 2 microbatches of at most 9 tokens."
            " Raise most_tokens or num_microbatches.",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(
    lengths: Any, count: int, options: Any, message: str
) -> None:
    with pytest.raises(MicrobatchError, match=re.escape(message)):
        pack(lengths, count, **options)


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, iter])
def test_lengths_may_be_an_array_or_a_tensor(make: Any) -> None:
    assert [[2], [0, 1]] == pack(make([3, 4, 5]), 2)


def test_lengths_whose_squares_have_no_float_are_refused() -> None:
    """They once ended in an OverflowError."""
    with pytest.raises(
        CostError, match=r"lengths\[0\] is 1e\+308\. Expected at most 1e\+15 tokens"
    ):
        pack([1e308, 1], 1, work=SQUARES)
    with pytest.raises(CostError, match=r"per_square is 1e\+200\. Expected a number from 0 to 1e"):
        Work(per_token=0, per_square=1e200)


def test_length_that_is_no_number_of_tokens_is_refused() -> None:
    with pytest.raises(CostError, match=r"lengths\[1\] is 0\. Expected a positive, finite number"):
        pack([1, 0], 1)
