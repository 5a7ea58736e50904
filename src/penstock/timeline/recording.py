"""Steps that really ran, as timelines like those of the simulator."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.costs.amounts import LARGEST_AMOUNT
from penstock.costs.cost_table import CostTable
from penstock.costs.json_format import Format
from penstock.errors import PipelineError, RecordError
from penstock.ir import Action, ReduceGrads, Reshard, Schedule, Unshard
from penstock.ir.action import SHARDING_TYPES
from penstock.passes.held_memory import Held
from penstock.passes.verification import verify
from penstock.timeline.bubble_report import Report, make_report
from penstock.timeline.costs_of_recording import recorded_costs
from penstock.timeline.timeline import Timeline

_FORMAT = Format(
    name="penstock recording",
    version=1,
    type_name="Recording",
    error=RecordError,
    remedy="record the run again",
)


_ENDLESS_S = 1e9  # No step takes thirty years.


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step; its times are in seconds since the first action on any rank began."""

    number: int
    """The number of steps that had been recorded before it, kept or not."""
    timeline: Timeline
    """The times; its schedule has what ran: only compute, with each overlap as two halves."""


@dataclass(frozen=True, slots=True, repr=False)
class Recording:
    """Steps of a pipeline, by the clock of rank 0.

    An action begins when its messages have arrived and ends when it has sent its own, so the time
    between two actions is the time that a rank waited.
    """

    steps: tuple[RecordedStep, ...]
    memory: tuple[tuple[Held, ...], ...] = ()
    """The bytes measured at each action of `schedule`, by rank; empty if memory was not measured.

    They are those of one step. Memory depends on the order of actions, not on their times.
    """

    def __post_init__(self) -> None:
        if not self.steps:
            raise RecordError("The recording has no steps. Record at least one.")

    @property
    def schedule(self) -> Schedule:
        """The schedule that most of the steps ran; of two that ran equally often, the later one."""
        counts = Counter(step.timeline.schedule for step in reversed(self.steps))
        return counts.most_common(1)[0][0]

    @property
    def _timelines(self) -> list[Timeline]:
        """The timelines of `schedule`."""
        schedule = self.schedule
        return [step.timeline for step in self.steps if step.timeline.schedule == schedule]

    def typical(self, costs: CostTable | None = None) -> Report:
        """Return the report of the typical step, the one of median time among those of `schedule`.

        Its planned memory is from `costs`. Without them, it follows from the measured memory, or a
        microbatch holds 1 on each rank.
        """
        timelines = sorted(self._timelines, key=lambda timeline: max(map(max, timeline.ends)))
        timeline = timelines[(len(timelines) - 1) // 2]
        return make_report(timeline, costs or self.costs(), self.memory)

    def simulated(self, costs: CostTable | None = None) -> Report:
        """Simulate `schedule` under `costs`, or under the costs of the recording itself."""
        from penstock.sim.simulator import simulate

        return simulate(self.schedule, costs or self.costs())

    def costs(self, *, by_microbatch: bool = False) -> CostTable:
        """Return the costs of the stages in the steps of `schedule`: medians, in seconds.

        With `by_microbatch`, they have a scale for each microbatch, by its own times and memory.
        If the halves of a backward never ran, each is taken to be half of it. The delay of messages
        is the median over those whose receiver was already waiting when they were sent. Memory is
        in bytes if it was measured; otherwise a microbatch holds 1 on each rank.
        """
        return recorded_costs(
            self.schedule, self._timelines, self.memory, by_microbatch=by_microbatch
        )

    def to_json(self) -> str:
        """Return the recording as JSON text, one line per step; `from_json` gives an equal one."""
        schedules = list(dict.fromkeys(step.timeline.schedule for step in self.steps))
        lines = (
            json.dumps(
                {
                    "number": step.number,
                    "schedule": schedules.index(step.timeline.schedule),
                    "starts": step.timeline.starts,
                    "ends": step.timeline.ends,
                }
            )
            for step in self.steps
        )
        head = {**_FORMAT.header, "schedules": [schedule.to_csv() for schedule in schedules]}
        if self.memory:
            columns = ([list(column) for column in zip(*row, strict=True)] for row in self.memory)
            during, after = map(list, zip(*columns, strict=True))
            head["memory"] = {"during": during, "after": after}
        return json.dumps(head)[:-1] + ', "steps": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> "Recording":
        """Return the recording that `to_json` wrote."""
        values = _FORMAT.parse(text)
        schedules = [_read_schedule(csv) for csv in _list_of(values, "schedules")]
        steps = _list_of(values, "steps")
        found = cls(tuple(_read_step(step, place, schedules) for place, step in enumerate(steps)))
        if "memory" not in values:
            return found
        return cls(found.steps, _read_memory(values["memory"], found.schedule))

    def save(self, path: str | PathLike[str]) -> None:
        """Write `to_json()` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Recording":
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (RecordError, UnicodeDecodeError) as exc:
            raise RecordError(f"The recording in {path} cannot be read: {exc}") from exc

    def __repr__(self) -> str:
        count = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        return f"Recording({count}, typical={self.typical()!r})"


def holds_recording(text: str) -> bool:
    """Return whether a text has the format of recordings, of any version, valid or not."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.get("format") == _FORMAT.name


def _list_of(values: dict[str, Any], name: str) -> list[Any]:
    found = values.get(name)
    if not isinstance(found, list):
        raise RecordError(f"{name} is {found!r}. Expected a list, as Recording.to_json() wrote it.")
    return found


def _read_schedule(csv: Any) -> Schedule:
    try:
        schedule = Schedule.from_csv(csv)
        verify(schedule)
    except PipelineError as exc:
        raise RecordError(f"A schedule in the recording cannot be run: {exc}") from exc
    return schedule


def _read_step(values: Any, place: int, schedules: list[Schedule]) -> RecordedStep:
    expected = "Expected what Recording.to_json() wrote: record the run again."
    match values:
        case {"number": int(number), "schedule": int(index), "starts": starts, "ends": ends} if (
            index in range(len(schedules))
        ):
            schedule = schedules[index]
        case _:
            raise RecordError(f"steps[{place}] lacks a number, a schedule or times. {expected}")
    shape = list(map(len, schedule.orders))
    if not all(_has_numbers(rows, shape, _ENDLESS_S) for rows in (starts, ends)):
        raise RecordError(
            f"steps[{place}] does not have one start and one end for each action of its schedule. "
            f"{expected}"
        )
    for rank, order in enumerate(schedule.orders):
        timed = list(zip(order, starts[rank], ends[rank], strict=True))
        # Gathers and reductions run beside the other actions, and a free waits for its gather.
        beside = [one for one in timed if isinstance(one[0], Unshard | ReduceGrads)]
        others = [one for one in timed if not isinstance(one[0], SHARDING_TYPES)]
        lanes = [beside, others, *([one] for one in timed if isinstance(one[0], Reshard))]
        if not all(map(_is_ascending, lanes)):
            raise RecordError(f"steps[{place}]: the times of rank {rank} go backwards. {expected}")
    return RecordedStep(
        number, Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
    )


def _read_memory(values: Any, schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    shape = list(map(len, schedule.orders))
    match values:
        case {"during": during, "after": after} if all(
            _has_numbers(rows, shape, LARGEST_AMOUNT) and min(map(min, rows)) >= 0
            for rows in (during, after)
        ):
            pairs = (zip(*rows, strict=True) for rows in zip(during, after, strict=True))
            return tuple(tuple(Held(*pair) for pair in row) for row in pairs)
    raise RecordError(
        "memory does not have two amounts for each action of the schedule that most steps ran. "
        "Expected what Recording.to_json() wrote: record the run again."
    )


def _is_ascending(lane: list[tuple[Action, float, float]]) -> bool:
    times = [time for _, start, end in lane for time in (start, end)]
    return all(a <= b for a, b in zip([0.0, *times], [*times, math.inf], strict=True))


def _has_numbers(values: Any, shape: list[int], limit: float) -> bool:
    """Return whether these are numbers below `limit`, as many for each rank as in `shape`."""
    return (
        isinstance(values, list)
        and all(isinstance(row, list) for row in values)
        and shape == list(map(len, values))
        and all(
            type(value) in (int, float) and abs(value) < limit for row in values for value in row
        )
    )
