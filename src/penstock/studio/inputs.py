"""What is typed into the page, checked field by field."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar, cast, get_args

from penstock.comparison import Question, ShareCosts
from penstock.comparison.amounts import to_amount
from penstock.draw.panel import MemoryUnit, TimeUnit
from penstock.errors import OptionError
from penstock.schedules import names
from penstock.schedules.base import Clock

T = TypeVar("T")

SEARCHED: Final = "searched"
"""Stands where a schedule's name does, for the one that is searched."""

DEFAULTS: Final[Mapping[str, str]] = {
    "schedule": "ZB-V",
    "beside": "1F1B",
    "ranks": "4",
    "microbatches": "8",
    "stages_per_rank": "",
    "forward": "1",
    "backward_input": "1",
    "backward_weight": "1",
    "delay": "0",
    "overlap_saving": "0",
    "activation": "1",
    "after_input": "1",
    "memory": "",
    "clock": "makespan",
    "units": "any",
    "search": "quick",
}
"""The fields, and what is in them at first."""

# So much is drawn within a moment.
_MOST_RANKS, _MOST_MICROBATCHES, _MOST_STAGES_PER_RANK = 64, 512, 8
_LARGEST_PRODUCT = 16_384
_MOST_VALUES, _LARGEST_VALUE = 512, 1e15
_UNITS: Final[Mapping[str, tuple[TimeUnit, MemoryUnit]]] = {
    "any": ("", ""),
    "seconds": ("s", ""),
    "seconds and bytes": ("s", "bytes"),
}
_EFFORTS: Final = {"off": 0.1, "quick": 0.1, "thorough": 1.0}
_SECONDS: Final = {"off": 10.0, "quick": 10.0, "thorough": 60.0}


class InputError(OptionError):
    """Fields hold what cannot be used: `problems` has a message for each."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = dict(problems)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the fields say."""

    question: Question
    schedule: str
    beside: str
    """Empty, or what is drawn under the schedule."""
    stages_per_rank: int | None
    effort: float
    seconds: float
    """How much and how long is searched."""


def read_inputs(query: Mapping[str, str]) -> Inputs:
    """Checks every field; those that are not given have their defaults."""
    form = _Form(query)
    search = form.read("search", _one_of(_EFFORTS))
    schedule = form.read("schedule", _one_of([*names(), SEARCHED]))
    beside = form.read("beside", _one_of(["", *names(), SEARCHED]))
    stages_per_rank = form.read("stages_per_rank", _stages_per_rank)
    question = Question(
        costs=_read_costs(form),
        num_ranks=form.read("ranks", _count(_MOST_RANKS)),
        num_microbatches=form.read("microbatches", _count(_MOST_MICROBATCHES)),
        memory=form.read("memory", _caps),
        clock=cast(Clock, form.read("clock", _one_of(get_args(Clock)))),
    )
    if not form.problems.keys() & {"ranks", "microbatches"}:
        form.problems.update(_check_together(question))
    if form.problems:
        raise InputError(form.problems)
    return Inputs(
        question=question,
        schedule=schedule,
        beside="" if beside == schedule else beside,
        stages_per_rank=stages_per_rank,
        effort=_EFFORTS[search],
        seconds=_SECONDS[search],
    )


class _Form:
    """The fields as they are read, and what is wrong with them so far."""

    def __init__(self, query: Mapping[str, str]) -> None:
        self._fields = {**DEFAULTS, **query}
        self.problems = {
            name: f"There is no field {name}. Expected some of {', '.join(DEFAULTS)}."
            for name in query.keys() - DEFAULTS
        }

    def read(self, name: str, convert: Callable[[str, str], T]) -> T:
        try:
            return convert(name, self._fields[name].strip())
        except OptionError as error:
            self.problems[name] = str(error)
            # Where there are problems, nobody looks at what was read.
            return convert(name, DEFAULTS[name])


def _read_costs(form: _Form) -> ShareCosts:
    time_unit, memory_unit = form.read("units", _units)
    return ShareCosts(
        forward=form.read("forward", _numbers),
        backward_input=form.read("backward_input", _numbers),
        backward_weight=form.read("backward_weight", _numbers),
        after_forward=form.read("activation", _numbers),
        after_input=form.read("after_input", _numbers),
        delay=form.read("delay", _number),
        overlap_saving=form.read("overlap_saving", _share),
        time_unit=time_unit,
        memory_unit=memory_unit,
    )


def _check_together(question: Question) -> dict[str, str]:
    """What fields that are right by themselves can have wrong together."""
    num_ranks, num_microbatches = question.num_ranks, question.num_microbatches
    problems = {}
    if num_ranks * num_microbatches > _LARGEST_PRODUCT:
        problems["microbatches"] = (
            f"{num_ranks} ranks and {num_microbatches} microbatches are too many to draw at once. "
            f"Expected a product of at most {_LARGEST_PRODUCT:,}."
        )
    memory = question.memory
    if isinstance(memory, tuple) and len(memory) != num_ranks:
        problems["memory"] = (
            f"memory has {len(memory)} numbers, but there are {num_ranks} ranks. Expected one for "
            "all ranks, or one for each."
        )
    return problems


def _count(most: int) -> Callable[[str, str], int]:
    def convert(name: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= most:
            raise OptionError(f"{_quote(name, text)} Expected a whole number from 1 to {most}.")
        return int(text)

    return convert


def _stages_per_rank(name: str, text: str) -> int | None:
    return _count(_MOST_STAGES_PER_RANK)(name, text) if text else None


def _number(name: str, text: str) -> float:
    value = _to_float(text)
    if not 0 <= value <= _LARGEST_VALUE:  # False where it is no number (nan).
        raise OptionError(f"{_quote(name, text)} Expected a number that is not negative.")
    return value


def _share(name: str, text: str) -> float:
    value = _to_float(text)
    if not 0 <= value <= 1:
        raise OptionError(f"{_quote(name, text)} Expected a number from 0 to 1.")
    return value


def _numbers(name: str, text: str) -> tuple[float, ...]:
    values = tuple(map(_to_float, text.split(",")))
    if len(values) > _MOST_VALUES or not all(0 <= value <= _LARGEST_VALUE for value in values):
        raise OptionError(
            f"{_quote(name, text)} Expected a number that is not negative, or several along the "
            "model with commas between: 1,1,2."
        )
    return values


def _caps(name: str, text: str) -> float | tuple[float, ...] | None:
    if not text:
        return None
    caps = tuple(to_amount(name, part) for part in text.split(","))
    return caps[0] if len(caps) == 1 else caps


def _units(name: str, text: str) -> tuple[TimeUnit, MemoryUnit]:
    return _UNITS[_one_of(_UNITS)(name, text)]


def _one_of(known: Iterable[str]) -> Callable[[str, str], str]:
    choices = list(known)

    def convert(name: str, text: str) -> str:
        if text not in choices:
            shown = ", ".join(choice or "nothing" for choice in choices)
            raise OptionError(f"{_quote(name, text)} Expected one of {shown}.")
        return text

    return convert


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _quote(name: str, text: str) -> str:
    """What is wrong, in a few words even where a lot was typed."""
    if not text:
        return f"{name} is empty."
    return f"{name} is {text if len(text) <= 40 else text[:37] + '...'!r}."
