"""The fields of the page, read and checked one by one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast, get_args

from penstock.costs import Work
from penstock.costs.amounts import LARGEST_AMOUNT, shortened, to_amount, to_counts
from penstock.costs.given_costs import ShareCosts
from penstock.costs.lengths import to_work
from penstock.costs.units import MemoryUnit, TimeUnit
from penstock.errors import FieldError, OptionError
from penstock.schedules import names
from penstock.schedules.generator import Clock
from penstock.solver.comparison import SEARCHED
from penstock.solver.question import Question

T = TypeVar("T")

DEFAULTS: Final[Mapping[str, str]] = {
    "schedule": "ZB-V",
    "beside": "1F1B",
    "ranks": "4",
    "microbatches": "8",
    "stages_per_rank": "",
    "lengths": "",
    "work": "1,0",
    "forward": "1",
    "backward_input": "1",
    "backward_weight": "1",
    "backward": "",
    "recompute_time": "",
    "delay": "0",
    "overlap_saving": "0",
    "activation": "1",
    "after_input": "1",
    "after_dropping": "0",
    "memory": "",
    "clock": "makespan",
    "units": "any",
    "search": "quick",
    "recompute": "no",
}
"""The fields and their default values."""

# This much is drawn without a noticeable wait.
LARGEST: Final[Mapping[str, int]] = {"ranks": 64, "microbatches": 512, "stages_per_rank": 8}
_LARGEST_PRODUCT = 8_192
_MOST_VALUES = 512
_UNITS: Final[Mapping[str, tuple[TimeUnit, MemoryUnit]]] = {
    "any": ("", ""),
    "seconds": ("s", ""),
    "seconds and bytes": ("s", "bytes"),
}
CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "clock": get_args(Clock),
    "units": tuple(_UNITS),
    "search": ("off", "quick", "thorough"),
    "recompute": ("no", "yes"),
}
"""The choices of the fields that are not numbers, apart from the schedules."""
_EFFORTS: Final = {"off": 0.1, "quick": 0.1, "thorough": 1.0}
_SECONDS: Final = {"off": 10.0, "quick": 10.0, "thorough": 60.0}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values of the fields."""

    question: Question
    schedule: str
    beside: str
    """The schedule that is drawn below the first one; may be empty."""
    stages_per_rank: int | None
    effort: float
    seconds: float
    """The time limit of the search."""


def read_inputs(query: Mapping[str, str]) -> Inputs:
    """Read and check every field; fields that are not given have their defaults."""
    form = _Form(query)
    search = form.read("search", _one_of(CHOICES["search"]))
    schedule = form.read("schedule", _one_of([*names(), SEARCHED]))
    beside = form.read("beside", _one_of(["", *names(), SEARCHED]))
    stages_per_rank = form.read("stages_per_rank", _count_or_none)
    costs = _read_costs(form)
    lengths, work = form.read("lengths", _lengths_or_none), form.read("work", to_work)
    question = Question(
        costs=costs if lengths is None else costs.for_lengths(lengths, work),
        num_ranks=form.read("ranks", _count),
        num_microbatches=form.read("microbatches", _count),
        memory=form.read("memory", _caps(costs.memory_unit)),
        clock=cast(Clock, form.read("clock", _one_of(CHOICES["clock"]))),
        recompute=form.read("recompute", _one_of(CHOICES["recompute"])) == "yes",
    )
    if lengths is None and work != Work() and "lengths" not in form.problems:
        form.problems["work"] = "work is given, but there are no lengths. Give lengths too."
    if not form.problems.keys() & {"ranks", "microbatches", "stages_per_rank"}:
        form.problems.update(_check_together(question, stages_per_rank))
    if form.problems:
        raise FieldError(form.problems)
    return Inputs(
        question=question,
        schedule=schedule,
        beside="" if beside == schedule else beside,
        stages_per_rank=stages_per_rank,
        effort=_EFFORTS[search],
        seconds=_SECONDS[search],
    )


def fields_of(costs: ShareCosts) -> dict[str, str]:
    """Return the text of the fields for these costs."""
    lists = {
        "forward": costs.forward,
        "backward_input": costs.backward_input,
        "backward_weight": costs.backward_weight,
        "backward": costs.backward or (),
        "activation": costs.after_forward,
        "after_input": costs.after_input,
        "after_dropping": costs.after_dropping,
        "recompute_time": () if costs.recompute == costs.forward else costs.recompute or (),
        "delay": (costs.delay,),
        "overlap_saving": (costs.overlap_saving,),
    }
    shown = {
        name: [repr(value).removesuffix(".0") for value in values] for name, values in lists.items()
    }
    return {
        name: texts[0] if len({*texts}) == 1 else ",".join(texts) for name, texts in shown.items()
    }


class _Form:
    """The fields as they are read, and the problems found so far."""

    def __init__(self, query: Mapping[str, str]) -> None:
        self._fields = {**DEFAULTS, **query}
        self.problems = {
            name: f"There is no field {name}. Expected some of {', '.join(DEFAULTS)}."
            for name in query
            if name not in DEFAULTS
        }

    def read(self, name: str, convert: Callable[[str, str], T]) -> T:
        try:
            return convert(name, self._fields[name].strip())
        except OptionError as error:
            self.problems[name] = str(error)
            # If there are problems, the values that were read are not used.
            return convert(name, DEFAULTS[name])


def _read_costs(form: _Form) -> ShareCosts:
    time_unit, memory_unit = form.read("units", _units)
    return ShareCosts(
        forward=form.read("forward", _numbers),
        backward_input=form.read("backward_input", _numbers),
        backward_weight=form.read("backward_weight", _numbers),
        backward=form.read("backward", _numbers_or_none),
        after_forward=form.read("activation", _numbers),
        after_input=form.read("after_input", _numbers),
        recompute=form.read("recompute_time", _numbers_or_none),
        after_dropping=form.read("after_dropping", _numbers),
        delay=form.read("delay", _number),
        overlap_saving=form.read("overlap_saving", _share),
        time_unit=time_unit,
        memory_unit=memory_unit,
    )


def _check_together(question: Question, stages_per_rank: int | None) -> dict[str, str]:
    """Return the problems of fields that are valid alone but not together."""
    num_ranks, num_microbatches = question.num_ranks, question.num_microbatches
    problems = {}
    product = num_ranks * num_microbatches * (stages_per_rank or 1)
    if product > _LARGEST_PRODUCT:
        problems["microbatches"] = (
            f"The product of ranks, microbatches and stages per rank is {product:,}: too much to "
            f"draw at once. Expected at most {_LARGEST_PRODUCT:,}."
        )
    sized = question.costs.num_microbatches
    if sized not in (None, num_microbatches):
        problems["lengths"] = (
            f"lengths has {sized} numbers, but there are {num_microbatches} microbatches. Expected "
            "one for each."
        )
    memory = question.memory
    if isinstance(memory, tuple) and len(memory) != num_ranks:
        problems["memory"] = (
            f"memory has {len(memory)} numbers, but there are {num_ranks} ranks. Expected one for "
            "all ranks, or one for each."
        )
    return problems


def _count(name: str, text: str) -> int:
    most = LARGEST[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= most:
        raise OptionError(f"{_quote(name, text)} Expected a whole number from 1 to {most}.")
    return int(text)


def _count_or_none(name: str, text: str) -> int | None:
    return _count(name, text) if text else None


def _number(name: str, text: str) -> float:
    value = _to_float(text)
    if not 0 <= value <= LARGEST_AMOUNT:  # False if it is not a number (nan).
        raise OptionError(f"{_quote(name, text)} Expected a number from 0 to {LARGEST_AMOUNT:g}.")
    return value


def _share(name: str, text: str) -> float:
    value = _to_float(text)
    if not 0 <= value <= 1:
        raise OptionError(f"{_quote(name, text)} Expected a number from 0 to 1.")
    return value


def _numbers(name: str, text: str) -> tuple[float, ...]:
    values = tuple(map(_to_float, text.split(",")))
    if len(values) > _MOST_VALUES or not all(0 <= value <= LARGEST_AMOUNT for value in values):
        raise OptionError(
            f"{_quote(name, text)} Expected a number from 0 to {LARGEST_AMOUNT:g}, or several "
            f"along the model, separated by commas: 1,1,2 (at most {_MOST_VALUES})."
        )
    return values


def _numbers_or_none(name: str, text: str) -> tuple[float, ...] | None:
    return _numbers(name, text) if text else None


def _lengths_or_none(name: str, text: str) -> list[int] | None:
    most = LARGEST["microbatches"]
    parts = [part.strip() for part in text.split(",")] if text else []
    if len(parts) > most or not all(part.isdecimal() and len(part) <= 9 for part in parts):
        raise OptionError(
            f"{_quote(name, text)} Expected the tokens of each microbatch, separated by commas, as "
            f"in 512,2048,1024: below 1e9, and for at most {most} microbatches."
        )
    return to_counts(name, text) if parts else None


def _caps(unit: MemoryUnit) -> Callable[[str, str], float | tuple[float, ...] | None]:
    def convert(name: str, text: str) -> float | tuple[float, ...] | None:
        if not text:
            return None
        parts = [part.strip() for part in text.split(",")]
        caps = tuple(to_amount(name, part) for part in parts)
        if unit != "bytes" and any(part[-1].isalpha() for part in parts):
            raise OptionError(
                f"{_quote(name, text)} Expected a number in the unit of activation, "
                "whose size in bytes is unknown. To give bytes, set units to seconds and bytes."
            )
        return caps[0] if len(caps) == 1 else caps

    return convert


def _units(name: str, text: str) -> tuple[TimeUnit, MemoryUnit]:
    return _UNITS[_one_of(CHOICES["units"])(name, text)]


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
    """Return the field and its text, shortened if it is long."""
    if not text:
        return f"{name} is empty."
    return f"{name} is {shortened(text)!r}."
