"""When each action of a schedule starts and ends, simulated or measured."""

from dataclasses import dataclass

from penstock.ir import Schedule


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """When each action starts and ends: `starts[rank][position]`, in step with the orders."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
