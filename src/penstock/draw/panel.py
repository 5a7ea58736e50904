"""What is drawn: a timeline, simulated or measured, and what every kind of drawing says of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal, NamedTuple

from penstock.costs import CostTable
from penstock.costs.units import MemoryUnit, TimeUnit, in_memory, in_time
from penstock.errors import DrawError
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Overlap, Rank
from penstock.ir.action import SINGLE_COMPUTE_TYPES, SingleCompute
from penstock.timeline import Recording, Report

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


class Kind(Enum):
    """The kinds of compute: one colour each. The value is the letter in the text format."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
}
_KINDS: dict[type[SingleCompute], Kind] = {
    Forward: Kind.FORWARD,
    Backward: Kind.BACKWARD,
    BackwardInput: Kind.BACKWARD_INPUT,
    BackwardWeight: Kind.BACKWARD_WEIGHT,
}


class Bar(NamedTuple):
    """A forward or backward on a rank's lane. The halves of an overlap share the height."""

    action: SingleCompute
    kind: Kind
    start: float
    end: float
    half: Literal["whole", "upper", "lower"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a drawing; several panels are drawn under each other on one time axis."""

    title: str
    report: Report
    time_unit: TimeUnit = ""
    """Simulated times may be in any unit; those of a real run are in seconds."""
    memory_unit: MemoryUnit = ""
    beneath: Report | None = None
    """Laid beneath each rank's lane, to compare: the simulated timeline of a measured step."""
    caps: tuple[float, ...] = ()
    """What each rank may hold, drawn as a line over its memory; empty if there is no cap."""

    def __post_init__(self) -> None:
        # It may be a file's name, in which anything can be.
        shown = (char if char.isprintable() else _UNPRINTABLE for char in self.title)
        object.__setattr__(self, "title", "".join(shown))
        if self.beneath is not None and len(self.beneath.ranks) != len(self.report.ranks):
            raise DrawError(
                f"beneath has {len(self.beneath.ranks)} ranks, but the report of {self.title!r} "
                f"has {len(self.report.ranks)}. Give a timeline of the same ranks."
            )
        if self.caps and len(self.caps) != len(self.report.ranks):
            raise DrawError(
                f"caps has {len(self.caps)} numbers, but the report of {self.title!r} has "
                f"{len(self.report.ranks)} ranks. Give one for each rank, or none."
            )
        if not all(0 <= cap < inf for cap in self.caps):
            raise DrawError(
                f"caps of {self.title!r} is {self.caps}. Expected finite numbers from 0. "
                "Leave caps out where there is no limit."
            )

    @classmethod
    def of_recording(
        cls, title: str, recording: Recording, costs: CostTable | None = None
    ) -> "Panel":
        """The typical step of a recording, with what the simulator makes of it beneath.

        `costs` are in seconds and bytes; without them those of the recording itself are taken, in
        which memory is counted in microbatches.
        """
        return cls(
            title,
            recording.typical(costs),
            time_unit="s",
            memory_unit="" if costs is None else "bytes",
            beneath=recording.simulated(costs),
        )

    def time(self, value: float) -> str:
        """A time in words."""
        return in_time(value, self.time_unit)

    def memory(self, value: float) -> str:
        """An amount of memory in words."""
        return in_memory(value, self.memory_unit)

    @property
    def facts(self) -> str:
        """Time, bubble and memory in one line."""
        report = self.report
        return (
            f"makespan {self.time(report.makespan)} (bubble {report.bubble_by_makespan:.1%}), "
            f"span {self.time(report.span)} (bubble {report.bubble_by_span:.1%}), "
            f"peak memory {self.memory(report.peak_memory)}"
        )


def memory_scale(panels: Sequence[Panel], unit: MemoryUnit) -> float:
    """What fills the height of a memory curve, for all panels of the unit.

    That is the peak, or a cap above it, unless the curves would become too low to be read.
    """
    alike = [panel for panel in panels if panel.memory_unit == unit]
    peak = max(panel.report.peak_memory for panel in alike)
    caps = (cap for panel in alike for cap in panel.caps if cap <= 2 * peak)
    return max(peak, *caps, 0.0) or 1.0


def check_panels(panels: Sequence[Panel]) -> None:
    """Raises if there is nothing to draw."""
    if not panels:
        raise DrawError("There is nothing to draw: panels is empty. Give at least one Panel.")


def bars(report: Report, rank: Rank) -> Iterator[Bar]:
    """The bars of a rank's lane, in time order. Sends and receives have none."""
    timeline = report.timeline
    order = timeline.schedule.orders[rank]
    for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
        if isinstance(action, Overlap):
            yield Bar(action.forward, Kind.FORWARD, start, end, "upper")
            yield Bar(action.backward, _KINDS[type(action.backward)], start, end, "lower")
        elif isinstance(action, SINGLE_COMPUTE_TYPES):
            yield Bar(action, _KINDS[type(action)], start, end, "whole")


def kinds(report: Report) -> list[Kind]:
    """The kinds that occur, for a legend."""
    ranks = range(report.timeline.schedule.num_ranks)
    found = {bar.kind for rank in ranks for bar in bars(report, rank)}
    return [kind for kind in Kind if kind in found]
