"""What each stage costs: times, memory, and what it takes to send its output on."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from penstock.costs.json_format import Format
from penstock.errors import CostError

_FORMAT = Format(
    name="penstock costs",
    version=1,
    type_name="CostTable",
    error=CostError,
    remedy="measure the costs again",
)


class StageCost(NamedTuple):
    """What one stage costs: times in one unit, memory in another."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    after_forward: float
    after_input: float


class EdgeCost(NamedTuple):
    """What a message between two neighbouring stages costs, on average of both directions."""

    delay: float
    message_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Times and memory of every stage, and of the edges between neighbouring stages.

    Times are in one unit, memory in another; which ones is up to you.
    Edge e joins stages e and e + 1, in both directions. A message on it takes `delay`, which many
    can do at once, and `message_bytes / bandwidth`, which those of one channel do one by one.
    A message never overtakes another on its channel. One that skips stages takes as long as on the
    slowest of the edges in between.

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
    delay: tuple[float, ...]
    message_bytes: tuple[float, ...]
    bandwidth: tuple[float, ...]
    overlap_saving: float = 0.0
    """Share of the shorter half that an overlapped pair saves: 0 none, 1 all of it."""

    def __init__(
        self,
        *,
        forward: Iterable[float],
        backward_input: Iterable[float],
        backward_weight: Iterable[float],
        backward: Iterable[float] | None = None,
        after_forward: Iterable[float] | float = 1.0,
        after_input: Iterable[float] | float = 1.0,
        delay: Iterable[float] | float = 0.0,
        message_bytes: Iterable[float] | float = 0.0,
        bandwidth: Iterable[float] | float = math.inf,
        overlap_saving: float = 0.0,
    ) -> None:
        """One value per stage, or per edge; for memory and messages one number may stand for all.

        A full backward costs as much as its halves if it is not given.
        """
        stages = _each("forward", forward)
        halves = _each("backward_input", backward_input), _each("backward_weight", backward_weight)
        full = (
            tuple(map(sum, zip(*halves, strict=False)))
            if backward is None
            else _each("backward", backward)
        )
        num_stages, num_edges = len(stages), max(len(stages) - 1, 0)
        values = {
            "forward": stages,
            "backward_input": halves[0],
            "backward_weight": halves[1],
            "backward": full,
            "after_forward": _spread("after_forward", after_forward, num_stages),
            "after_input": _spread("after_input", after_input, num_stages),
            "delay": _spread("delay", delay, num_edges),
            "message_bytes": _spread("message_bytes", message_bytes, num_edges),
            "bandwidth": _spread("bandwidth", bandwidth, num_edges),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "overlap_saving", _plain("overlap_saving", overlap_saving))
        self._check()

    @classmethod
    def of(cls, stages: Iterable[StageCost], edges: Iterable[EdgeCost]) -> "CostTable":
        """The costs of stages, and of the edges between them, each by itself."""
        by_stage, by_edge = list(stages), list(edges)
        return cls(
            forward=[cost.forward for cost in by_stage],
            backward_input=[cost.backward_input for cost in by_stage],
            backward_weight=[cost.backward_weight for cost in by_stage],
            backward=[cost.backward for cost in by_stage],
            after_forward=[cost.after_forward for cost in by_stage],
            after_input=[cost.after_input for cost in by_stage],
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
        delay: float = 0.0,
        message_bytes: float = 0.0,
        bandwidth: float = math.inf,
        overlap_saving: float = 0.0,
    ) -> "CostTable":
        """The same costs for every stage.

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
            delay=delay,
            message_bytes=message_bytes,
            bandwidth=bandwidth,
            overlap_saving=overlap_saving,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def transfer(self) -> tuple[float, ...]:
        """How long a message keeps its channel busy, for each edge."""
        return tuple(
            size / speed for size, speed in zip(self.message_bytes, self.bandwidth, strict=True)
        )

    def to_json(self) -> str:
        """The table as JSON text, one line per field; `from_json` gives an equal one."""
        values: dict[str, Any] = _FORMAT.header
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = (
                list(map(_as_json, value)) if isinstance(value, tuple) else _as_json(value)
            )
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """The table that `to_json` wrote.

        >>> costs = CostTable.uniform(4, forward=0.1)
        >>> CostTable.from_json(costs.to_json()) == costs
        True
        """
        values = _FORMAT.parse(text)
        names = {field.name for field in fields(cls)}
        for problem, found in (
            ("has no", names - values.keys()),
            ("has", values.keys() - names - {"format", "version"}),
        ):
            if found:
                raise CostError(
                    f"The text {problem} {', '.join(sorted(found))}. Expected exactly the fields "
                    f"of a CostTable: {', '.join(sorted(names))}."
                )
        read = {name: _from_json(name, values[name]) for name in names}
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
            raise CostError(f"{path} holds no costs that can be read: {exc}") from exc

    def _check(self) -> None:
        if not self.forward:
            raise CostError("forward is empty. Give the time of at least one stage.")
        num_edges = self.num_stages - 1
        for field in fields(self)[:-1]:
            values = getattr(self, field.name)
            of_edges = field.name in ("delay", "message_bytes", "bandwidth")
            expected = num_edges if of_edges else self.num_stages
            if len(values) != expected:
                raise CostError(
                    f"{field.name} has {len(values)} values, but forward has {self.num_stages}. "
                    f"Expected {expected}: one per {'edge' if of_edges else 'stage'}."
                )
            for index, value in enumerate(values):
                _check_value(field.name, index, value)
        if math.inf in self.transfer:
            raise CostError(
                f"message_bytes / bandwidth of edge {self.transfer.index(math.inf)} is infinite. "
                "Expected sizes and bandwidths in one unit."
            )
        if not 0 <= self.overlap_saving <= 1:
            raise CostError(
                f"overlap_saving is {self.overlap_saving}. Expected a share between 0 and 1."
            )


def _each(name: str, values: Iterable[float]) -> tuple[float, ...]:
    if not isinstance(values, Iterable):
        raise CostError(
            f"{name} is {values!r}. Expected one number per stage; "
            "CostTable.uniform gives all stages the same."
        )
    return tuple(_plain(f"{name}[{index}]", value) for index, value in enumerate(values))


def _spread(name: str, value: Iterable[float] | float, count: int) -> tuple[float, ...]:
    return _each(name, value) if isinstance(value, Iterable) else (_plain(name, value),) * count


def _plain(name: str, value: float) -> float:
    """A number of Python's own: sums of others may be rounded, or overflow, by rules of theirs."""
    if not isinstance(value, Real):
        raise CostError(f"{name} is {value!r}. Expected a number.")
    try:
        as_float = float(value)
    except OverflowError:
        raise CostError(f"{name} has more digits than a float holds. Use a larger unit.") from None
    return value if type(value) is int else as_float


def _check_value(name: str, index: int, value: float) -> None:
    if name == "bandwidth":
        fits, expected = value > 0, "a positive number, or math.inf"
    else:
        fits, expected = 0 <= value < math.inf, "a finite number that is not negative"
    if not fits:  # Also where the value is not a number (nan).
        raise CostError(f"{name}[{index}] is {value}. Expected {expected}.")


def _as_json(value: float) -> float | str:
    """A number that json writes in full; JSON has no infinity, so that is a word."""
    if value == math.inf:
        return "inf"
    return value


def _from_json(name: str, value: Any) -> Any:
    if name == "overlap_saving":
        if not _is_number(value):
            raise CostError(f"{name} is {value!r}. Expected a number.")
        return value
    if not isinstance(value, list):
        raise CostError(f"{name} is {value!r}. Expected a list of numbers.")
    for index, number in enumerate(value):
        if not _is_number(number) and number != "inf":
            raise CostError(f'{name}[{index}] is {number!r}. Expected a number, or "inf".')
    return [math.inf if number == "inf" else number for number in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
