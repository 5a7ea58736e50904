"""Steps that were really run, as the timelines that the simulator would have made of them."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.costs.cost_table import CostTable
from penstock.costs.json_format import Format
from penstock.errors import PipelineError, RecordError
from penstock.ir import Schedule
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
    """One step, its times in seconds since the first action on any rank began."""

    number: int
    """How many steps had been recorded before it, kept or not."""
    timeline: Timeline
    """Its schedule is what was run: compute only, and an overlap in its two halves."""


@dataclass(frozen=True, slots=True, repr=False)
class Recording:
    """Steps of a pipeline, by the clock of rank 0.

    An action begins when its messages have come and ends when it has sent its own, so what lies
    between two actions is what a rank waited.
    """

    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise RecordError("The recording has no steps. Record at least one.")

    @property
    def schedule(self) -> Schedule:
        """What most of the steps ran; of two that ran as often, the later one."""
        counts = Counter(step.timeline.schedule for step in reversed(self.steps))
        return counts.most_common(1)[0][0]

    @property
    def _timelines(self) -> list[Timeline]:
        """Those of `schedule`."""
        schedule = self.schedule
        return [step.timeline for step in self.steps if step.timeline.schedule == schedule]

    def typical(self, costs: CostTable | None = None) -> Report:
        """The step of median time among those of `schedule`, measured.

        Memory is not measured: it is as `costs` say, or a microbatch holds 1 on each rank.
        """
        timelines = sorted(self._timelines, key=lambda timeline: max(map(max, timeline.ends)))
        return make_report(timelines[(len(timelines) - 1) // 2], costs or self.costs())

    def simulated(self, costs: CostTable | None = None) -> Report:
        """What the simulator makes of `schedule`, by `costs` or those of the recording itself."""
        from penstock.sim.simulator import simulate

        return simulate(self.schedule, costs or self.costs())

    def costs(self) -> CostTable:
        """What the stages took in the steps of `schedule`: medians, in seconds.

        Halves of a backward that never ran are taken to be half of it each. The delay of messages
        is the median of those that were waited for from when they were sent.
        """
        return recorded_costs(self.schedule, self._timelines)

    def to_json(self) -> str:
        """The recording as JSON text, one line per step; `from_json` gives an equal one."""
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
        return json.dumps(head)[:-1] + ', "steps": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> "Recording":
        """The recording that `to_json` wrote."""
        values = _FORMAT.parse(text)
        schedules = [_read_schedule(csv) for csv in _list_of(values, "schedules")]
        steps = _list_of(values, "steps")
        return cls(tuple(_read_step(step, place, schedules) for place, step in enumerate(steps)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write `to_json()` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Recording":
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (RecordError, UnicodeDecodeError) as exc:
            raise RecordError(f"{path} holds no recording that can be read: {exc}") from exc

    def __repr__(self) -> str:
        count = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        return f"Recording({count}, typical={self.typical()!r})"


def holds_recording(text: str) -> bool:
    """Whether a text is of the format of recordings, in whatever version and state."""
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
        raise RecordError(f"A schedule in it could not have been run: {exc}") from exc
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
    if not (_has_times(starts, shape) and _has_times(ends, shape)):
        raise RecordError(
            f"steps[{place}] has not one start and one end for each action of its schedule. "
            f"{expected}"
        )
    for rank in range(schedule.num_ranks):
        times = [time for pair in zip(starts[rank], ends[rank], strict=True) for time in pair]
        if not all(a <= b for a, b in zip([0.0, *times], [*times, math.inf], strict=True)):
            raise RecordError(f"steps[{place}]: times of rank {rank} go backwards. {expected}")
    return RecordedStep(
        number, Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
    )


def _has_times(values: Any, shape: list[int]) -> bool:
    """Whether these are times, as many for each rank as `shape` says."""
    return (
        isinstance(values, list)
        and all(isinstance(row, list) for row in values)
        and shape == list(map(len, values))
        and all(
            type(time) in (int, float) and abs(time) < _ENDLESS_S for row in values for time in row
        )
    )
