"""Pack documents into microbatches that take about the same work."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

from penstock.costs.lengths import Work, check_length
from penstock.costs.plain_numbers import to_lists
from penstock.errors import MicrobatchError

_CLOSE = 1 - 1e-9  # A gain below this share is rounding.


class _Document(NamedTuple):
    work: float
    tokens: float
    number: int


def pack(
    lengths: Iterable[float],
    num_microbatches: int,
    *,
    work: Work | None = None,
    most_tokens: float | None = None,
) -> list[list[int]]:
    """Return the documents of each microbatch, as indices, so that all take about the same work.

    Microbatches with the same number of tokens may take very different work: attention within one
    document of 8192 tokens takes eight times that within eight of 1024. `work` is the rule; without
    it, work is the number of tokens. No microbatch has more than `most_tokens`, if that is given,
    and none is empty. The same lengths give the same microbatches.

    The documents with the most work are placed first, each where there is the least work. Then
    documents are moved and traded while that takes work from the microbatch with the most.

    >>> from penstock.costs import Work
    >>> pack([4, 1, 1, 1, 1, 4], 2)
    [[0, 1, 3], [2, 4, 5]]
    >>> pack([4, 1, 1, 1, 1, 4], 3, work=Work(per_token=0, per_square=1))
    [[0], [5], [1, 2, 3, 4]]
    """
    rule = Work() if work is None else work
    documents = _read(lengths, num_microbatches, rule, most_tokens)
    cap = inf if most_tokens is None else most_tokens
    found = _place(documents, num_microbatches, cap, by_work=True)
    if found is None:
        found = _place(documents, num_microbatches, cap, by_work=False)
    if found is None:
        total = sum(document.tokens for document in documents)
        raise MicrobatchError(
            f"{len(documents)} documents with {total:g} tokens in all did not fit into "
            f"{num_microbatches} microbatches of at most {most_tokens:g} tokens. Raise most_tokens "
            "or num_microbatches."
        )
    while _improve(found, cap):
        pass
    return [sorted(document.number for document in microbatch) for microbatch in found]


def _read(
    lengths: Any, num_microbatches: int, work: Work, most_tokens: float | None
) -> list[_Document]:
    """Return the documents, checked."""
    lengths = to_lists(lengths)
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
        raise MicrobatchError(f"lengths is {lengths!r}. Expected one length per document.")
    tokens = [check_length(f"lengths[{index}]", value) for index, value in enumerate(lengths)]
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise MicrobatchError(
            f"num_microbatches is {num_microbatches!r}. Expected a whole number, at least 1."
        )
    if len(tokens) < num_microbatches:
        raise MicrobatchError(
            f"The number of documents is {len(tokens)}, but there are {num_microbatches} "
            "microbatches. Expected at least one for each: use fewer microbatches."
        )
    if not isinstance(work, Work):
        raise MicrobatchError(f"work is {work!r}. Expected a penstock.costs.Work.")
    if most_tokens is not None and max(tokens) > check_length("most_tokens", most_tokens):
        index = tokens.index(max(tokens))
        raise MicrobatchError(
            f"lengths[{index}] is {tokens[index]}, but most_tokens is {most_tokens}. Raise it, or "
            "cut the document."
        )
    return [_Document(work(length), length, index) for index, length in enumerate(tokens)]


def _place(
    documents: list[_Document], count: int, cap: float, *, by_work: bool
) -> list[list[_Document]] | None:
    """Place the largest first: where the least work is, or the least room; None if one is left.

    With caps, the second fits more. The first `count` documents get a microbatch each.
    """
    found: list[list[_Document]] = [[] for _ in range(count)]
    works, rooms = [0.0] * count, [cap] * count
    ordered = sorted(
        documents, key=lambda one: (-(one.work if by_work else one.tokens), one.number)
    )
    for number, document in enumerate(ordered):
        fitting = [place for place in range(count) if document.tokens <= rooms[place]]
        if number < count:
            place = number
        elif fitting:
            place = min(fitting, key=(works if by_work else rooms).__getitem__)
        else:
            return None
        found[place].append(document)
        works[place] += document.work
        rooms[place] -= document.tokens
    return found


def _improve(microbatches: list[list[_Document]], cap: float) -> bool:
    """Take work from the microbatch with the most, by one move or trade; return whether it did."""
    works = [sum(document.work for document in one) for one in microbatches]
    tokens = [sum(document.tokens for document in one) for one in microbatches]
    most = max(range(len(works)), key=works.__getitem__)
    for other in sorted(range(len(works)), key=works.__getitem__):
        best, chosen = works[most] * _CLOSE, None
        for given, taken in _trades(
            microbatches[most], microbatches[other], works[most] - works[other]
        ):
            gain = given.work - (taken.work if taken else 0.0)
            more = given.tokens - (taken.tokens if taken else 0.0)
            fits = tokens[other] + more <= cap and tokens[most] - more <= cap
            after = max(works[most] - gain, works[other] + gain)
            if fits and after < best:
                best, chosen = after, (given, taken)
        if chosen is not None:
            given, taken = chosen
            microbatches[most].remove(given)
            microbatches[other].append(given)
            if taken is not None:
                microbatches[other].remove(taken)
                microbatches[most].append(taken)
            return True
    return False


def _trades(
    fuller: list[_Document], emptier: list[_Document], gap: float
) -> Iterator[tuple[_Document, _Document | None]]:
    """Yield documents to give away, each for nothing or for those that leave the smallest gap."""
    ordered = sorted(emptier)
    for given in fuller:
        if len(fuller) > 1:
            yield given, None
        wanted = given.work - gap / 2  # With that, both have the same work.
        near = bisect_left(ordered, (wanted,))
        for taken in ordered[max(0, near - 1) : near + 1]:
            yield given, taken
