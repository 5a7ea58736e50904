"""Panels: timelines to draw, simulated or measured, and the facts that every drawing states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal, NamedTuple

from penstock.costs import CostTable
from penstock.costs.units import MemoryUnit, TimeUnit, in_memory, in_time
from penstock.errors import DrawError
from penstock.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Rank,
    Recompute,
    ReduceGrads,
    Unshard,
)
from penstock.ir.action import SINGLE_COMPUTE_TYPES, SingleCompute
from penstock.timeline import MemoryPoint, Recording, Report

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


class Kind(Enum):
    """The kinds of bars: one colour and one letter each; for computes, that of the text format."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    GATHER = "G"
    REDUCE = "S"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
    Kind.RECOMPUTE: "recomputation",
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduction",
}
_KINDS: dict[type[SingleCompute], Kind] = {
    Forward: Kind.FORWARD,
    Backward: Kind.BACKWARD,
    BackwardInput: Kind.BACKWARD_INPUT,
    BackwardWeight: Kind.BACKWARD_WEIGHT,
    Recompute: Kind.RECOMPUTE,
}


class Bar(NamedTuple):
    """A bar on a rank's lane, or on that of its collectives. Halves of an overlap share the height.

    It is a compute, or a gather or reduction.
    """

    action: SingleCompute | Unshard | ReduceGrads
    kind: Kind
    start: float
    end: float
    half: Literal["whole", "upper", "lower"]

    @property
    def number(self) -> int:
        """The microbatch, or the stage of a gather or reduction, which is of no microbatch."""
        action = self.action
        return action.stage if isinstance(action, Unshard | ReduceGrads) else action.mb


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a drawing; several panels are drawn one below the other on one time axis."""

    title: str
    report: Report
    time_unit: TimeUnit = ""
    """Simulated times may be in any unit; those of a real run are in seconds."""
    memory_unit: MemoryUnit = ""
    beneath: Report | None = None
    """The simulated timeline of a measured step, drawn beneath each rank's lane to compare."""
    caps: tuple[float, ...] = ()
    """The most each rank may hold, drawn as a line over its memory; empty if there is no cap."""

    def __post_init__(self) -> None:
        # It may be the name of a file, which can contain any character.
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
        """Return the typical step of a recording, with its simulated timeline beneath.

        `costs` are in seconds and bytes. Without them the recording's own costs are used, which
        count memory in bytes if it was measured, and otherwise in microbatches.
        """
        return cls(
            title,
            recording.typical(costs),
            time_unit="s",
            memory_unit="bytes" if costs is not None or recording.memory else "",
            beneath=recording.simulated(costs),
        )

    def time(self, value: float) -> str:
        """Return a time in words."""
        return in_time(value, self.time_unit)

    def memory(self, value: float) -> str:
        """Return an amount of memory in words."""
        return in_memory(value, self.memory_unit)

    def measured_memory(self, rank: Rank) -> list[MemoryPoint]:
        """Return the measured memory to draw over the planned: empty unless both are in bytes."""
        return self.report.measured_memory(rank) if self.memory_unit == "bytes" else []

    @property
    def measured_peaks(self) -> list[str]:
        """The measured peak of each rank in words; empty if memory was not measured."""
        return [in_memory(peak, "bytes") for peak in self.report.measured_peaks]

    @property
    def facts(self) -> str:
        """Time, bubble and memory in one line."""
        report = self.report
        peaks = report.measured_peaks
        measured = f" (measured {in_memory(max(peaks), 'bytes')})" if peaks else ""
        return (
            f"makespan {self.time(report.makespan)} (bubble {report.bubble_by_makespan:.1%}), "
            f"span {self.time(report.span)} (bubble {report.bubble_by_span:.1%}), "
            f"peak memory {self.memory(report.peak_memory)}{measured}"
        )


def memory_scale(panels: Sequence[Panel], unit: MemoryUnit) -> float:
    """Return the amount that fills the height of a memory curve, for all panels of the unit.

    It is the peak, or a cap above it unless that would make the curves too low to read.
    """
    alike = [panel for panel in panels if panel.memory_unit == unit]
    peaks = [panel.report.peak_memory for panel in alike]
    if unit == "bytes":
        peaks += [peak for panel in alike for peak in panel.report.measured_peaks]
    peak = max(peaks)
    caps = (cap for panel in alike for cap in panel.caps if cap <= 2 * peak)
    return max(peak, *caps, 0.0) or 1.0


def check_panels(panels: Sequence[Panel]) -> None:
    """Raise an error if there is nothing to draw."""
    if not panels:
        raise DrawError("There is nothing to draw: panels is empty. Give at least one Panel.")


def bars(report: Report, rank: Rank) -> Iterator[Bar]:
    """Yield the bars of a rank's lane, in time order. Sends and receives have no bars."""
    timeline = report.timeline
    order = timeline.schedule.orders[rank]
    for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
        if isinstance(action, Overlap):
            yield Bar(action.forward, Kind.FORWARD, start, end, "upper")
            yield Bar(action.backward, _KINDS[type(action.backward)], start, end, "lower")
        elif isinstance(action, SINGLE_COMPUTE_TYPES):
            yield Bar(action, _KINDS[type(action)], start, end, "whole")


def collective_bars(report: Report, rank: Rank) -> Iterator[Bar]:
    """Yield the gathers and reductions of a rank that take time, in time order."""
    if not report.timeline.schedule.has_sharding:
        return
    timeline = report.timeline
    order = timeline.schedule.orders[rank]
    for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
        if isinstance(action, Unshard | ReduceGrads) and end > start:
            kind = Kind.GATHER if isinstance(action, Unshard) else Kind.REDUCE
            yield Bar(action, kind, start, end, "whole")


def has_collectives(report: Report) -> bool:
    """Return whether there are gathers or reductions to draw, on a lane of their own."""
    return any(True for rank in range(len(report.ranks)) for _ in collective_bars(report, rank))


def kinds(report: Report) -> list[Kind]:
    """Return the kinds that occur, for a legend."""
    ranks = range(report.timeline.schedule.num_ranks)
    every = ((*bars(report, rank), *collective_bars(report, rank)) for rank in ranks)
    found = {bar.kind for lane in every for bar in lane}
    return [kind for kind in Kind if kind in found]
