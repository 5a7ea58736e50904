"""Schedules given by the name of an algorithm, or by a file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from penstock.cli.costs_option import costs_of, read_costs
from penstock.cli.files import PIPE, read_text
from penstock.cli.gathers_option import place_gathers
from penstock.costs.given_costs import GivenCosts, TableCosts
from penstock.errors import OptionError, PipelineError, ScheduleError
from penstock.ir import Schedule
from penstock.passes import verify
from penstock.schedules import get
from penstock.schedules.generator import Generator
from penstock.solver.placement_choices import describe
from penstock.timeline import Recording
from penstock.training.checks import check_size

_NUM_RANKS, _NUM_MICROBATCHES = 4, 8  # The defaults.


class ShapeOptions(NamedTuple):
    """The options for the shape of a schedule; None if one is not given."""

    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None
    lengths: int | None = None
    """The number of lengths of microbatches."""

    def of(self, schedule: Schedule | None, costs: GivenCosts | None) -> tuple[int, int]:
        """Return the numbers of ranks and microbatches.

        They are those given, or those of `schedule` or of the recording that the costs are from,
        or the defaults. If microbatches differ in size, there are as many as have a size.
        """
        sized = self.lengths or (costs.num_microbatches if costs else None)
        if schedule is not None and sized not in (None, schedule.num_microbatches):
            raise OptionError(
                f"{sized} microbatches of different sizes are given, but the schedule has "
                f"{schedule.num_microbatches}. Give a length for each of them."
            )
        if schedule is None and costs is not None:
            schedule = costs.schedule
        if self.microbatches is not None and sized not in (None, self.microbatches):
            raise OptionError(
                f"--microbatches is {self.microbatches}, but {sized} microbatches of different "
                "sizes are given. Leave it out."
            )
        usual = (
            (_usual_ranks(costs), sized or _NUM_MICROBATCHES)
            if schedule is None
            else (schedule.num_ranks, sized or schedule.num_microbatches)
        )
        numbers = self.ranks or usual[0], self.microbatches or usual[1]
        check_size(*numbers)
        return numbers


@dataclass(frozen=True, slots=True)
class Given:
    """A schedule, with the name or file that the user gave."""

    name: str
    schedule: Schedule
    recording: Recording | None = None
    """The recording, if the schedule comes from one."""


def read_schedules(
    names: Sequence[str],
    options: ShapeOptions,
    costs: GivenCosts | None = None,
    *,
    gathers: str | None = None,
) -> list[Given]:
    """Return the schedules with these names and files, in their order.

    Schedules by name have the shape of the options, or else of the first file or of the costs.
    If the policy `gathers` is given, all have its gathers in place of their own.
    """
    given = _read(names, options, costs)
    return [replace(one, schedule=place_gathers(one.schedule, gathers)) for one in given]


def _read(names: Sequence[str], options: ShapeOptions, costs: GivenCosts | None) -> list[Given]:
    found = [_generator_or_file(name) for name in names]
    files = [value for value in found if isinstance(value, Given)]
    generators = [value for value in found if isinstance(value, Generator)]
    for file in files:
        _check_shape(file, options, is_alone=not generators)
    num_ranks, num_microbatches = options.of(files[0].schedule if files else None, costs)
    takes_any = [generator.takes_any_stages_per_rank for generator in generators]
    return [
        value
        if isinstance(value, Given)
        else Given(
            value.name,
            value(
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                # If another schedule takes any number, the rest keep their own.
                stages_per_rank=options.stages_per_rank
                if value.takes_any_stages_per_rank or not any(takes_any)
                else None,
            ),
        )
        for value in found
    ]


def choose_costs(
    given: Sequence[Given], named: GivenCosts | None, delay: float | None
) -> GivenCosts:
    """Return the costs of the option, or those measured in the first recording."""
    if named is not None:
        return named
    for one in given:
        if one.recording is not None:
            return costs_of(one.recording, delay)
    return read_costs(None, delay)


def read_file(path: str) -> Given:
    """Read and verify the schedule in a file: PyTorch's CSV or a recording."""
    text = read_text(path)
    where = "standard input" if path == PIPE else path
    try:
        if text.lstrip().startswith("{"):
            recording = Recording.from_json(text)
            return Given(where, recording.schedule, recording)
        schedule = Schedule.from_csv(text)
        verify(schedule)
        return Given(where, schedule)
    except PipelineError as exc:
        raise type(exc)(f"{where}: {exc}") from exc


def describe_shape(schedule: Schedule) -> str:
    """Return the numbers of ranks, stages, microbatches and actions, and the placement.

    >>> describe_shape(get("1F1B")(num_ranks=4, num_microbatches=8))
    '4 ranks, 4 stages (linear), 8 microbatches, 64 actions'
    """
    ranks, stages, *others = schedule.counts
    return ", ".join([ranks, f"{stages} ({describe(schedule.placement)})", *others])


def _usual_ranks(costs: GivenCosts | None) -> int:
    """Return 4, or the number of stages in the costs if 4 does not divide it."""
    if isinstance(costs, TableCosts) and costs.costs.num_stages % _NUM_RANKS:
        return costs.costs.num_stages
    return _NUM_RANKS


def _generator_or_file(name: str) -> Generator | Given:
    try:
        return get(name)
    except ScheduleError:
        if _looks_like_a_file(name):
            return read_file(name)
        raise


def _looks_like_a_file(name: str) -> bool:
    path = Path(name)
    return name == PIPE or os.sep in name or path.suffix in (".csv", ".json") or path.exists()


def _check_shape(file: Given, options: ShapeOptions, *, is_alone: bool) -> None:
    """Raise an error if the options differ from the shape of a file, which is fixed."""
    for option, wanted, found, noun in (
        ("--ranks", options.ranks, file.schedule.num_ranks, "ranks"),
        ("--microbatches", options.microbatches, file.schedule.num_microbatches, "microbatches"),
    ):
        if wanted not in (None, found):
            raise OptionError(
                f"{option} is {wanted}, but {file.name} has {found} {noun}. Leave it out: the file "
                "has its own number."
            )
    if is_alone and options.stages_per_rank is not None:
        raise OptionError(
            f"--stages-per-rank is {options.stages_per_rank}, but {file.name} has its own stages. "
            "Leave it out: it is for schedules given by name."
        )
