"""The costs of each stage: times, memory, and messages to its neighbours."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.costs.json_format import Format
from penstock.costs.lengths import Lengths, Work, scales_of
from penstock.costs.microbatch_scales import check_agreement, read_row, read_rows
from penstock.costs.plain_numbers import to_plain
from penstock.errors import CostError

_FORMAT = Format(
    name="penstock costs",
    version=1,
    type_name="CostTable",
    error=CostError,
    remedy="measure the costs again",
)
DURING: Final = ("during_forward", "during_input", "during_weight", "during_backward")
RECOMPUTING: Final = ("after_dropping", "during_dropping", "during_recompute")
HELD: Final = ("after_forward", "after_input", *DURING, *RECOMPUTING)
"""The fields of memory that depends on the size of microbatches."""
SHARDING: Final = ("gather", "reduce", "gathered")
SCALES: Final = ("time_scale", "memory_scale")
"""The fields with a factor for each microbatch."""
# Costs that many stages do not have. Files without them are as valid: older ones have none of them.
_OPTIONAL = (*DURING, "after_dropping", *SHARDING, *SCALES)
# Those of recomputations that are as of forwards if they are not given.
_AS_FORWARDS = {
    "recompute": "forward",
    "during_dropping": "during_forward",
    "during_recompute": "during_forward",
}
_OF_EDGES = ("delay", "message_bytes", "bandwidth")


class StageCost(NamedTuple):
    """The costs of one stage: times in one unit, memory in another."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    after_forward: float
    after_input: float
    during_forward: float = 0.0
    during_input: float = 0.0
    during_weight: float = 0.0
    during_backward: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    gathered: float = 0.0
    after_dropping: float = 0.0
    during_dropping: float | None = None
    during_recompute: float | None = None
    recompute: float | None = None
    """This and the two before are those of the forward if they are None."""


STAGE_COSTS: Final = tuple(StageCost.__annotations__)


class EdgeCost(NamedTuple):
    """The cost of a message between two neighbouring stages, averaged over both directions."""

    delay: float
    message_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Times and memory of every stage, and of the edges between neighbouring stages.

    Times are in one unit, memory in another; you choose the units.
    Edge e joins stages e and e + 1, in both directions. A message on it takes `delay`, during which
    other messages may be under way, plus `message_bytes / bandwidth`, which the messages of one
    channel take one after another. A message never overtakes another on its channel. One that skips
    stages takes as long as on the slowest edge in between.

    >>> CostTable.uniform(4, forward=2.0).forward
    (2.0, 2.0, 2.0, 2.0)
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...]
    after_forward: tuple[float, ...]
    """Memory that a microbatch holds from the start of its forward to the end of its I or B."""
    after_input: tuple[float, ...]
    """Memory that a microbatch holds from the end of its I to the end of its W."""
    during_forward: tuple[float, ...]
    """The most memory that F needs at any moment beyond what its rank held before it."""
    during_input: tuple[float, ...]
    """The same for I."""
    during_weight: tuple[float, ...]
    """The same for W."""
    during_backward: tuple[float, ...]
    """The same for B."""
    delay: tuple[float, ...]
    message_bytes: tuple[float, ...]
    bandwidth: tuple[float, ...]
    gather: tuple[float, ...]
    """Time of gathering the sharded parameters of a stage."""
    reduce: tuple[float, ...]
    """Time of reducing the gradients of a stage's weights over replicas."""
    gathered: tuple[float, ...]
    """Memory that a stage holds from the start of its gather until it is freed."""
    recompute: tuple[float, ...]
    """Time of running a forward once more for its backward; that of the forward if not given."""
    after_dropping: tuple[float, ...]
    """Memory that a microbatch holds from the start of an F that is recomputed to its R."""
    during_dropping: tuple[float, ...]
    """The most memory that such an F needs at any moment beyond what its rank held before it.

    That of any forward if not given.
    """
    during_recompute: tuple[float, ...]
    """The same for R."""
    overlap_saving: float = 0.0
    """Share of the shorter half that an overlapped pair saves: 0 none, 1 all of it."""
    time_scale: tuple[tuple[float, ...], ...] = ()
    """By stage and microbatch: the factor of its times; empty if all microbatches are alike."""
    memory_scale: tuple[float, ...] = ()
    """By microbatch: the factor of what it holds and sends; empty if all are alike."""

    def __init__(
        self,
        *,
        forward: Iterable[float],
        backward_input: Iterable[float],
        backward_weight: Iterable[float],
        backward: Iterable[float] | None = None,
        after_forward: Iterable[float] | float = 1.0,
        after_input: Iterable[float] | float = 1.0,
        during_forward: Iterable[float] | float = 0.0,
        during_input: Iterable[float] | float = 0.0,
        during_weight: Iterable[float] | float = 0.0,
        during_backward: Iterable[float] | float = 0.0,
        delay: Iterable[float] | float = 0.0,
        message_bytes: Iterable[float] | float = 0.0,
        bandwidth: Iterable[float] | float = math.inf,
        gather: Iterable[float] | float = 0.0,
        reduce: Iterable[float] | float = 0.0,
        gathered: Iterable[float] | float = 0.0,
        recompute: Iterable[float] | None = None,
        after_dropping: Iterable[float] | float = 0.0,
        during_dropping: Iterable[float] | float | None = None,
        during_recompute: Iterable[float] | float | None = None,
        overlap_saving: float = 0.0,
        time_scale: Iterable[float] | Iterable[Iterable[float]] = (),
        memory_scale: Iterable[float] = (),
    ) -> None:
        """Take one value per stage or per edge; except for computes, one number may do for all.

        A full backward costs as much as its halves if it is not given. `time_scale` has one number
        per microbatch, or a row of them for each stage.
        """
        stages = _each("forward", forward)
        halves = _each("backward_input", backward_input), _each("backward_weight", backward_weight)
        full = (
            tuple(map(sum, zip(*halves, strict=False)))
            if backward is None
            else _each("backward", backward)
        )
        num_stages, num_edges = len(stages), max(len(stages) - 1, 0)
        # What is not known of a recomputed forward is taken from the forward that it repeats.
        needed = _spread("during_forward", during_forward, num_stages)
        if during_dropping is None:
            during_dropping = needed
        if during_recompute is None:
            during_recompute = needed
        values = {
            "forward": stages,
            "backward_input": halves[0],
            "backward_weight": halves[1],
            "backward": full,
            "after_forward": _spread("after_forward", after_forward, num_stages),
            "after_input": _spread("after_input", after_input, num_stages),
            "during_forward": needed,
            "during_input": _spread("during_input", during_input, num_stages),
            "during_weight": _spread("during_weight", during_weight, num_stages),
            "during_backward": _spread("during_backward", during_backward, num_stages),
            "delay": _spread("delay", delay, num_edges),
            "message_bytes": _spread("message_bytes", message_bytes, num_edges),
            "bandwidth": _spread("bandwidth", bandwidth, num_edges),
            "gather": _spread("gather", gather, num_stages),
            "reduce": _spread("reduce", reduce, num_stages),
            "gathered": _spread("gathered", gathered, num_stages),
            "recompute": stages if recompute is None else _each("recompute", recompute),
            "after_dropping": _spread("after_dropping", after_dropping, num_stages),
            "during_dropping": _spread("during_dropping", during_dropping, num_stages),
            "during_recompute": _spread("during_recompute", during_recompute, num_stages),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "overlap_saving", to_plain("overlap_saving", overlap_saving))
        object.__setattr__(self, "time_scale", read_rows("time_scale", time_scale, num_stages))
        object.__setattr__(self, "memory_scale", read_row("memory_scale", memory_scale))
        self._check()

    @classmethod
    def of(cls, stages: Iterable[StageCost], edges: Iterable[EdgeCost]) -> "CostTable":
        """Return the table of the given stages and of the edges between them."""
        by_stage, by_edge = list(stages), list(edges)
        of_stages: Any = {name: [getattr(x, name) for x in by_stage] for name in STAGE_COSTS}
        for name, usual in _AS_FORWARDS.items():
            given = zip(of_stages[name], of_stages[usual], strict=True)
            of_stages[name] = [other if own is None else own for own, other in given]
        return cls(
            **of_stages,
            delay=[cost.delay for cost in by_edge],
            message_bytes=[cost.message_bytes for cost in by_edge],
        )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        stages_per_rank: int = 1,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        backward: float | None = None,
        after_forward: float = 1.0,
        after_input: float = 1.0,
        during_forward: float = 0.0,
        during_input: float = 0.0,
        during_weight: float = 0.0,
        during_backward: float = 0.0,
        delay: float = 0.0,
        message_bytes: float = 0.0,
        bandwidth: float = math.inf,
        gather: float = 0.0,
        reduce: float = 0.0,
        gathered: float = 0.0,
        recompute: float | None = None,
        after_dropping: float = 0.0,
        during_dropping: float | None = None,
        during_recompute: float | None = None,
        overlap_saving: float = 0.0,
        time_scale: Iterable[float] | Iterable[Iterable[float]] = (),
        memory_scale: Iterable[float] = (),
    ) -> "CostTable":
        """Return a table with the same costs for every stage.

        Times and memory are those of `stages_per_rank` stages together, so that placements can be
        compared: with 2, each stage costs half.
        """
        if stages_per_rank < 1:
            raise CostError(f"stages_per_rank is {stages_per_rank}. Expected at least 1.")
        share = 1 / stages_per_rank
        return cls(
            forward=[forward * share] * num_stages,
            backward_input=[backward_input * share] * num_stages,
            backward_weight=[backward_weight * share] * num_stages,
            backward=None if backward is None else [backward * share] * num_stages,
            after_forward=after_forward * share,
            after_input=after_input * share,
            during_forward=during_forward * share,
            during_input=during_input * share,
            during_weight=during_weight * share,
            during_backward=during_backward * share,
            delay=delay,
            message_bytes=message_bytes,
            bandwidth=bandwidth,
            gather=gather * share,
            reduce=reduce * share,
            gathered=gathered * share,
            recompute=None if recompute is None else [recompute * share] * num_stages,
            after_dropping=after_dropping * share,
            during_dropping=None if during_dropping is None else during_dropping * share,
            during_recompute=None if during_recompute is None else during_recompute * share,
            overlap_saving=overlap_saving,
            time_scale=time_scale,
            memory_scale=memory_scale,
        )

    def for_lengths(
        self, lengths: Lengths, *, measured_length: float | None = None, work: Work | None = None
    ) -> "CostTable":
        """Return the same costs for microbatches of these lengths, in tokens.

        Times grow by the rule `work`, memory and messages with the number of tokens. If a
        microbatch is packed, give the lengths of its documents in place of their sum. The table is
        that of one document of `measured_length`, or of the mean length if that is not given.

        >>> costs = CostTable.uniform(2).for_lengths([512, 1024, [1024, 512]], measured_length=1024)
        >>> costs.time_scale[0]
        (0.5, 1.0, 1.5)
        """
        times, tokens = scales_of(lengths, measured_length, Work() if work is None else work)
        return replace(self, time_scale=(times,) * self.num_stages, memory_scale=tokens)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches that have scales; None if all are alike, however many."""
        row = self.memory_scale or next(iter(self.time_scale), ())
        return len(row) or None

    @property
    def transfer(self) -> tuple[float, ...]:
        """The time that a message keeps its channel busy, for each edge, before `memory_scale`."""
        return tuple(
            size / speed for size, speed in zip(self.message_bytes, self.bandwidth, strict=True)
        )

    def to_json(self) -> str:
        """Return the table as JSON text, one line per field; `from_json` gives an equal one.

        Memory during actions, what dropped forwards hold and costs of sharded parameters are left
        out if they are all zero, other costs of recomputation if they are those of forwards, and
        scales if there are none.
        """
        values: dict[str, Any] = _FORMAT.header
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OPTIONAL and not any(value):
                continue
            usual = _AS_FORWARDS.get(field.name)
            if usual is not None and value == getattr(self, usual):
                continue
            values[field.name] = _as_json(value)
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Return the table that `to_json` wrote.

        >>> costs = CostTable.uniform(4, forward=0.1)
        >>> CostTable.from_json(costs.to_json()) == costs
        True
        """
        values = _FORMAT.parse(text)
        names = {field.name for field in fields(cls)}
        for problem, found in (
            ("has no", names - values.keys() - {*_OPTIONAL, *_AS_FORWARDS}),
            ("has", values.keys() - names - {"format", "version"}),
        ):
            if found:
                raise CostError(
                    f"The text {problem} {', '.join(sorted(found))}. Expected exactly the fields "
                    f"of a CostTable: {', '.join(sorted(names))}."
                )
        read = {name: _from_json(name, values[name]) for name in names & values.keys()}
        return cls(**read)

    def save(self, path: str | PathLike[str]) -> None:
        """Write `to_json()` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "CostTable":
        """Read what `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (CostError, UnicodeDecodeError) as exc:
            raise CostError(f"The costs in {path} cannot be read: {exc}") from exc

    def _check(self) -> None:
        if not self.forward:
            raise CostError("forward is empty. Give the time of at least one stage.")
        num_edges = self.num_stages - 1
        for field in fields(self):
            if field.name in ("overlap_saving", *SCALES):
                continue
            values = getattr(self, field.name)
            of_edges = field.name in _OF_EDGES
            expected = num_edges if of_edges else self.num_stages
            if len(values) != expected:
                raise CostError(
                    f"{field.name} has {len(values)} values, but forward has {self.num_stages}. "
                    f"Expected {expected}: one per {'edge' if of_edges else 'stage'}."
                )
            for index, value in enumerate(values):
                _check_value(field.name, index, value)
        for stage, (dropped, kept) in enumerate(
            zip(self.after_dropping, self.after_forward, strict=True)
        ):
            if dropped > kept * (1 + 1e-9):  # Shares of equal amounts may be rounded.
                raise CostError(
                    f"after_dropping[{stage}] is {dropped}, but after_forward[{stage}] is {kept}. "
                    "Expected at most that: what is recomputed is not held before."
                )
        if math.inf in self.transfer:
            raise CostError(
                f"message_bytes / bandwidth of edge {self.transfer.index(math.inf)} is infinite. "
                "Expected sizes and bandwidths in one unit."
            )
        if not 0 <= self.overlap_saving <= 1:
            raise CostError(
                f"overlap_saving is {self.overlap_saving}. Expected a share between 0 and 1."
            )
        check_agreement(self.time_scale, self.memory_scale)


def _each(name: str, values: Iterable[float]) -> tuple[float, ...]:
    if not isinstance(values, Iterable):
        raise CostError(
            f"{name} is {values!r}. Expected one number per stage; "
            "CostTable.uniform gives all stages the same."
        )
    return tuple(to_plain(f"{name}[{index}]", value) for index, value in enumerate(values))


def _spread(name: str, value: Iterable[float] | float, count: int) -> tuple[float, ...]:
    return _each(name, value) if isinstance(value, Iterable) else (to_plain(name, value),) * count


def _check_value(name: str, index: int, value: float) -> None:
    if name == "bandwidth":
        fits, expected = value > 0, "a positive number, or math.inf"
    else:
        fits, expected = 0 <= value < math.inf, "a finite number that is not negative"
    if not fits:  # Also where the value is not a number (nan).
        raise CostError(f"{name}[{index}] is {value}. Expected {expected}.")


def _as_json(value: Any) -> Any:
    """Return numbers that json writes in full, or a word for infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return list(map(_as_json, value))
    return "inf" if value == math.inf else value


def _from_json(name: str, value: Any) -> Any:
    if name == "overlap_saving":
        if not _is_number(value):
            raise CostError(f"{name} is {value!r}. Expected a number.")
        return value
    if not isinstance(value, list):
        raise CostError(f"{name} is {value!r}. Expected a list of numbers.")
    if name == "time_scale" and all(isinstance(row, list) for row in value):
        return [_from_json(f"{name}[{stage}]", row) for stage, row in enumerate(value)]
    for index, number in enumerate(value):
        if not _is_number(number) and number != "inf":
            raise CostError(f'{name}[{index}] is {number!r}. Expected a number, or "inf".')
    return [math.inf if number == "inf" else number for number in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
