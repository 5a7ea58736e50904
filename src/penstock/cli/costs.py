"""What `--costs` and `--delay` say of the stages."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from penstock.cli.amounts import to_times
from penstock.cli.files import read_text
from penstock.cli.options import LARGEST_TIME
from penstock.draw.panel import TimeUnit
from penstock.errors import OptionError, PipelineError
from penstock.ir import Placement, Rank, Schedule
from penstock.planner.placements import default_placements
from penstock.sim import CostTable, Recording
from penstock.sim.recording import holds_recording


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """Times of a rank's whole share, the same for each rank, however many stages it has."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    delay: float = 0.0
    time_unit: TimeUnit = ""
    schedule: None = None

    def table(self, placement: Placement) -> CostTable:
        """The costs of the stages; a microbatch holds 1 on a rank."""
        num_held = Counter(placement.ranks)
        shares = [1 / num_held[rank] for rank in placement.ranks]
        return CostTable(
            forward=[self.forward * share for share in shares],
            backward_input=[self.backward_input * share for share in shares],
            backward_weight=[self.backward_weight * share for share in shares],
            after_forward=shares,
            after_input=shares,
            delay=self.delay,
        )


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of given stages."""

    source: str
    costs: CostTable
    time_unit: TimeUnit
    schedule: Schedule | None
    """What was recorded, if they are from a recording."""

    @classmethod
    def of_recording(cls, source: str, recording: Recording, delay: float | None) -> "StageCosts":
        """What was measured, in seconds."""
        costs = _with_delay(recording.costs(), delay)
        return cls(source, costs, "s", recording.schedule)

    def table(self, placement: Placement) -> CostTable:
        """The costs, if they are of as many stages as `placement` has.

        Those that were recorded are known by rank too: with another number of stages, each has an
        equal part of what its rank took.
        """
        if placement.num_stages != self.costs.num_stages:
            recorded = None if self.schedule is None else self.schedule.placement
            if recorded is not None and recorded.num_ranks == placement.num_ranks:
                return _spread(self.costs, recorded, placement)
            raise OptionError(
                f"{self.source} has the costs of {self.costs.num_stages} stages, but "
                f"{placement.num_stages} are needed. Give costs for each stage, or a schedule "
                "with as many stages as there are costs."
            )
        return self.costs


Costs: TypeAlias = ShareCosts | StageCosts


def read_costs(text: str | None, delay: float | None) -> Costs:
    """The costs that the options give; without any, F, I and W take 1 each."""
    times = (1.0, 1.0, 1.0) if text is None else to_times(text)
    if times is not None:
        if not all(0 <= time <= LARGEST_TIME for time in times):
            raise OptionError(
                f"--costs is {text}. Expected times that are not negative, up to {LARGEST_TIME:g}."
            )
        return ShareCosts(*times, delay=delay or 0.0)
    assert text is not None
    if not Path(text).exists():
        raise OptionError(
            f"--costs is {text!r}, which is neither a file nor three numbers. Expected the times "
            "of F, I and W, such as 1,1,0.5, or a file that CostTable.save wrote."
        )
    return _load(text, delay)


def choose_stages_per_rank(costs: Costs, num_ranks: int, wanted: int | None) -> int | None:
    """As many as a file of costs has for each rank, or else as wanted."""
    if not isinstance(costs, StageCosts):
        return wanted
    num_stages = costs.costs.num_stages
    count = default_placements(num_stages, num_ranks)[0].num_stages // num_ranks
    if wanted not in (None, count):
        raise OptionError(
            f"--stages-per-rank is {wanted}, but {costs.source} has the costs of {num_stages} "
            f"stages, which are {count} on each of {num_ranks} ranks. Leave it out."
        )
    return count


def _load(path: str, delay: float | None) -> StageCosts:
    """From a file of costs, or of recorded steps."""
    text = read_text(path)
    try:
        if holds_recording(text):
            return StageCosts.of_recording(path, Recording.from_json(text), delay)
        return StageCosts(path, _with_delay(CostTable.from_json(text), delay), "", None)
    except PipelineError as exc:
        raise OptionError(f"{path} holds no costs that can be read: {exc}") from exc


def _with_delay(costs: CostTable, delay: float | None) -> CostTable:
    """The costs, with `delay` in place of the delays that are known, if it is given."""
    if delay is None:
        return costs
    return replace(costs, delay=(delay,) * (costs.num_stages - 1))


def _spread(costs: CostTable, recorded: Placement, placement: Placement) -> CostTable:
    """The costs by rank, in equal parts for the stages that a rank has in another placement."""
    counts = Counter(placement.ranks)

    def spread(values: Sequence[float]) -> list[float]:
        totals: defaultdict[Rank, float] = defaultdict(float)
        for rank, value in zip(recorded.ranks, values, strict=True):
            totals[rank] += value
        return [totals[rank] / counts[rank] for rank in placement.ranks]

    between_ranks = [
        delay
        for delay, ends in zip(costs.delay, pairwise(recorded.ranks), strict=True)
        if ends[0] != ends[1]
    ]
    return CostTable(
        forward=spread(costs.forward),
        backward_input=spread(costs.backward_input),
        backward_weight=spread(costs.backward_weight),
        backward=spread(costs.backward),
        after_forward=spread(costs.after_forward),
        after_input=spread(costs.after_input),
        delay=fmean(between_ranks) if between_ranks else 0.0,
    )
