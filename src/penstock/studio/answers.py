"""The answers to the page: the picture, the table, and files to save."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NotRequired, TypedDict

from penstock.costs.units import in_memory, in_time
from penstock.draw import Panel, save
from penstock.draw.web_page import PageData, page_data
from penstock.errors import FieldError, ScheduleError
from penstock.ir import Placement, Schedule
from penstock.schedules import REGISTRY, get
from penstock.sim import simulate
from penstock.solver import SearchResult
from penstock.solver.best_schedule import advise_on, find_best
from penstock.solver.chosen_orders import describe_order, describe_recomputed
from penstock.solver.comparison import SEARCHED, Comparison, Row
from penstock.solver.placement_choices import default_placements, describe
from penstock.solver.question import Question
from penstock.solver.shortage import nothing_fits
from penstock.studio.generated_python import python_text
from penstock.studio.typed_inputs import Inputs
from penstock.timeline import Report

# The ending of the name, for each kind of file.
FILES: Final = {
    "CSV": ".csv",
    "SVG": ".svg",
    "PNG": ".png",
    "page": ".html",
    "trace": "_trace.json",
    "costs": "_costs.json",
}


class FileData(TypedDict):
    """A file that the page can request."""

    label: str
    href: str


class PictureData(TypedDict):
    """The picture, with its notes, its Python and its files."""

    page: PageData
    notes: list[str]
    said: list[str]
    """Sentences about the searched schedule."""
    python: str
    files: list[FileData]


class RowData(TypedDict):
    """A schedule in the table: its numbers, as words and for sorting, or why it cannot be made."""

    name: str
    cells: list[str]
    fits: bool
    time: float | None
    peak: float | None
    why: str
    note: NotRequired[str]


class AdviceData(TypedDict):
    """The sentences under the table."""

    advice: list[str]


class BoundData(TypedDict):
    """The line under the table."""

    bound: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A schedule to draw."""

    name: str
    schedule: Schedule
    report: Report
    excess: str
    """The memory that it needs over a cap, in words; empty if it fits."""


def search(inputs: Inputs) -> SearchResult:
    """Search with one stage per rank, with two, and with the number given; return the best."""
    groups = _groups(inputs)
    return find_best(inputs.question, groups, seconds=inputs.seconds, effort=inputs.effort)


def advise(inputs: Inputs, found: SearchResult) -> AdviceData:
    """Say what limits the searched schedule, and what would help."""
    seconds, effort = inputs.seconds, inputs.effort
    advice = advise_on(inputs.question, found, _groups(inputs), seconds=seconds, effort=effort)
    return {"advice": advice.lines}


def check_memory(inputs: Inputs) -> None:
    """Raise an error if no schedule can fit."""
    problems = [
        inputs.question.problem(placement)
        for placements in _groups(inputs)
        for placement in placements
    ]
    if all(problem.find_shortage() is not None for problem in problems):
        raise FieldError({"memory": str(nothing_fits(problems))})


def make(inputs: Inputs, field: str, name: str, found: SearchResult | None) -> Shown:
    """Return the schedule that `field` names; `found` is the searched one."""
    question = inputs.question
    if name == SEARCHED:
        assert found is not None
        schedule = found.schedule
    else:
        generator = get(name)
        try:
            schedule = generator(
                num_ranks=question.num_ranks,
                num_microbatches=question.num_microbatches,
                stages_per_rank=inputs.stages_per_rank
                if generator.takes_any_stages_per_rank
                else None,
            )
        except ScheduleError as error:
            raise FieldError({field: str(error)}) from error
    problem = question.problem(schedule.placement)
    report = simulate(schedule, problem.costs)
    return Shown(name, schedule, report, question.describe_excess(problem, report))


def panels(question: Question, shown: list[Shown]) -> list[Panel]:
    """Return the panels to draw, with a line at each cap."""
    memory = question.memory
    caps = () if memory is None else memory if isinstance(memory, tuple) else (memory,)
    return [
        Panel(
            one.name,
            one.report,
            time_unit=question.costs.time_unit,
            memory_unit=question.costs.memory_unit,
            caps=caps * question.num_ranks if len(caps) == 1 else caps,
        )
        for one in shown
    ]


def picture(inputs: Inputs, shown: list[Shown], query: str) -> PictureData:
    """Return the schedules one below the other; the Python and the CSV are those of the first.

    `query` is the part of an address that holds the fields.
    """
    question = inputs.question
    first = shown[0]
    stem = f"{first.name.lower()}_p{question.num_ranks}_m{question.num_microbatches}"
    return {
        "page": page_data(panels(question, shown)),
        "notes": [f"{one.name} {one.excess}: more than the cap." for one in shown if one.excess],
        "said": [line for one in shown for line in _sentences(question, one)],
        "python": python_text(inputs, first.name, first.schedule),
        "files": [
            {"label": label, "href": f"/files/{stem}{ending}?{query}"}
            for label, ending in FILES.items()
        ],
    }


def _sentences(question: Question, shown: Shown) -> Iterator[str]:
    """Yield what a searched schedule recomputes, and the order of microbatches that differ."""
    if shown.name == SEARCHED and question.recompute:
        yield describe_recomputed(shown.schedule)
    if shown.name == SEARCHED and question.costs.num_microbatches is not None:
        yield describe_order(shown.schedule)


def file(question: Question, shown: list[Shown], name: str) -> bytes:
    """Return the content of the file `name`, which has one of the endings in `FILES`."""
    first = shown[0]
    if name.endswith(FILES["CSV"]):
        return first.schedule.to_csv().encode()
    if name.endswith(FILES["costs"]):
        return first.report.costs.to_json().encode()
    with TemporaryDirectory() as folder:
        path = Path(folder, "drawing").with_suffix(Path(name).suffix)
        save(panels(question, shown), path)
        return path.read_bytes()


def table(inputs: Inputs) -> Iterator[RowData | BoundData]:
    """Yield a row for each registered schedule as soon as it is known, and last the bound."""
    comparison = Comparison(inputs.question)
    for generator in REGISTRY:
        name = generator.name
        row = comparison.add_registered(generator, inputs.stages_per_rank)
        why = comparison.left_out.get(name, "has no backward")
        yield row_data(inputs.question, row) if row else _left_out(name, why)
    yield {"bound": comparison.bound_in_words}


def searched_row(inputs: Inputs, found: SearchResult) -> RowData:
    """Return the table's row for the searched schedule."""
    row = Comparison(inputs.question).add(SEARCHED, found.schedule)
    assert row is not None
    count = sum(tried.count for tried in found.tried)
    ending = "" if found.is_complete else ", when the time ran out"
    note = f"{count:,} schedules were tried in {found.seconds:.1f} s{ending}."
    return {**row_data(inputs.question, row), "note": note}


def row_data(question: Question, row: Row) -> RowData:
    """Return a row in words."""
    costs, peak = question.costs, row.report.peak_memory
    return {
        "name": row.name,
        "cells": [
            in_time(row.time, costs.time_unit),
            f"{row.bubble:.2%}",
            in_memory(peak, costs.memory_unit),
            "" if row.gap is None else f"{row.gap:.2%}",
            describe(row.placement),
        ],
        "fits": not row.excess,
        "time": row.time,
        "peak": peak,
        "why": row.excess,
    }


def _left_out(name: str, why: str) -> RowData:
    return {"name": name, "cells": [], "fits": False, "time": None, "peak": None, "why": why}


def _groups(inputs: Inputs) -> list[list[Placement]]:
    """Return the placements to search: a list for each number of stages."""
    num_ranks = inputs.question.num_ranks
    counts = {1, 2, inputs.stages_per_rank or 1}
    return [default_placements(num_ranks * count, num_ranks) for count in sorted(counts)]
