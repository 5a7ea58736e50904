"""The start and end of each action of a schedule, simulated or measured."""

from dataclasses import dataclass

from penstock.ir import Schedule


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The start and end of each action: `starts[rank][position]`, as in the orders."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
