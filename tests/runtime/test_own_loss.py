"""The labels that count in a model's own loss, found from one microbatch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import StageError
from penstock.runtime.own_loss import Counted, Labels, OwnLoss

ROWS, LENGTH, WORDS = 2, 5, 7


def make_logits() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH))
    labels[0, 3:] = -100
    return torch.randn(ROWS, LENGTH, WORDS), labels


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_labels_that_count_are_those_whose_mean_the_loss_is(dtype: torch.dtype) -> None:
    logits, labels = make_logits()
    logits = logits.to(dtype)
    for loss, counted in (
        (mean(logits, labels), Counted.ALL),
        (mean(logits.float(), labels), Counted.ALL),
        (mean(logits[:, :-1], labels[:, 1:]), Counted.ALL_BUT_FIRST),
        (mean(logits[:, :-1].float(), labels[:, 1:]), Counted.ALL_BUT_FIRST),
    ):
        own = OwnLoss()
        assert own.learn(SimpleNamespace(logits=logits), loss, labels)
        assert counted is own.counted


def test_first_labels_alone_show_that_they_do_not_count() -> None:
    logits, labels = make_logits()
    labels[:, 1:] = -100
    loss = mean(logits[:, :-1], labels[:, 1:])
    assert loss.isnan()
    own = OwnLoss()
    assert own.learn({"logits": logits}, loss, labels)
    assert Counted.ALL_BUT_FIRST is own.counted


def test_microbatch_without_labels_or_with_broken_logits_shows_nothing() -> None:
    logits, labels = make_logits()
    own = OwnLoss()
    none = torch.full_like(labels, -100)
    assert not own.learn({"logits": logits}, mean(logits, none), none)
    broken = torch.full_like(logits, torch.nan)
    assert not own.learn({"logits": broken}, mean(broken, labels), labels)
    assert own.counted is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({}, r"the mean of: no logits belong to them\. Expected"),
        ({"logits": torch.zeros(ROWS, LENGTH + 1, WORDS)}, "no logits belong to them"),
        ({"logits": torch.zeros(ROWS, LENGTH, WORDS)}, r"it is 5, and the cross-entropy of the lo"),
    ],
)
def test_loss_of_another_kind_is_refused(output: dict[str, Any], message: str) -> None:
    _, labels = make_logits()
    with pytest.raises(StageError, match=message):
        OwnLoss().learn(output, torch.tensor(5.0), labels)


def test_labels_are_found_among_the_arguments() -> None:
    _, labels = make_logits()
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]

    def counts(**given: Any) -> Any:
        found = Labels.of([given])
        return None if found is None else found.counts()

    assert {Counted.ALL: [8.0], Counted.ALL_BUT_FIRST: [6.0]} == counts(labels=labels)
    assert {Counted.ALL: [6.0], Counted.ALL_BUT_FIRST: [4.0]} == counts(shift_labels=shifted)
    assert counts(labels=labels, shift_labels=shifted) == counts(shift_labels=shifted)
    rows = labels[:, 0]
    assert {Counted.ALL: [2.0], Counted.ALL_BUT_FIRST: [2.0]} == counts(labels=rows)
    for given in (
        {},
        {"labels": labels.float()},
        {"labels": torch.tensor(1)},
        {"labels": [1, 2]},
        {"labels": labels, "num_items_in_batch": torch.tensor(3)},
    ):
        assert counts(**given) is None
