"""Plan the cut, the number of microbatches and the schedule for a model together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn

from penstock.costs import CostTable, Level, Work
from penstock.costs.lengths import Lengths
from penstock.cutting import LayerCost
from penstock.errors import CostError, ScheduleError
from penstock.ir import Placement
from penstock.planning.batch_layers import GivenLayers, LayersOfBatch, ModelLayers
from penstock.planning.checked_counts import to_amount, to_count, to_counts
from penstock.planning.choosing import Found, Limits, choose
from penstock.planning.layer_source import LayerSource
from penstock.planning.level_source import LevelSource
from penstock.planning.microbatch_counts import choose_counts, larger_counts
from penstock.planning.plan_table import LeftOut, Plan, PlanRow
from penstock.planning.sized_source import SizedSource
from penstock.planning.stage_sources import AbstractSource, Choice, Refusal, Request, TableSource
from penstock.solver.placement_choices import describe
from penstock.solver.shortage import in_full


def plan(
    what: nn.Module | Sequence[LayerCost] | CostTable | Mapping[Level, CostTable],
    num_ranks: int,
    *,
    batch: Any,
    kwargs: dict[str, Any] | None = None,
    mb_size: int | None = None,
    memory: float | None = None,
    microbatches: int | Iterable[int] | None = None,
    lengths: Lengths | None = None,
    work: Work | None = None,
    stages_per_rank: int | Iterable[int] = (1, 2),
    layers: Sequence[Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    measure: bool = False,
    speed: float | None = None,
    delay: float = 0.0,
    overhead: float = 0.0,
    bytes_per_parameter_byte: float = 4.0,
    seconds: float = 60.0,
    effort: float = 1.0,
    keep: int = 5,
) -> Plan:
    """Return the best ways to cut a model, with numbers of microbatches and schedules.

    `what` is one of
    - a model; `batch` and `kwargs` are its arguments for a whole batch. Costs are counted from
      shapes, also on the meta device: as operations, or as seconds if `speed` is the number of
      operations that a rank does per second. With `measure` they are measured on this machine.
      `layers` is as in `penstock.cut_between_modules`. With `loss_fn`, the last layer has the cost
      of the loss too; `target` is that of a whole batch, which torch's own losses do not need.
    - costs of layers for microbatches of `mb_size` samples; `batch` is a number of samples.
    - a table of stages, with the same `mb_size` and `batch`; `memory` is for activations only.
    - tables of the same stages by memory level; the plan chooses a level for each stage.

    Each rank has `memory`, of which parameters take `bytes_per_parameter_byte` times their size.
    The default counts each parameter, its gradient and Adam's two moments.
    `microbatches` are the numbers to choose from. The default is some divisors of the batch size,
    and larger ones only if nothing else fits. If microbatches differ, `lengths` has the tokens of
    each, and `work` the rule for their times, as in `CostTable.for_lengths`; the plan then has as
    many microbatches, and says in which order they run.
    A message between ranks takes at least `delay`. `overhead` is the part of an action's time that
    does not depend on the size of its microbatch. It is added to the times of layers; the times of
    a table already include it.

    The plan has at most `keep` rows. Searches take at most about `seconds`, and more `effort` tries
    more schedules.

    >>> layers = [LayerCost(f"layer{n}", 3.0, 0.0, 1.0) for n in range(8)]
    >>> plan(layers, 4, batch=16, mb_size=2, microbatches=8, stages_per_rank=1, memory=8).best
    PlanRow(8 microbatches of 2, linear, time=54, bubble=11.11%, memory=8, gap=0.00%)
    """
    request = Request(
        num_ranks=to_count("num_ranks", num_ranks),
        memory=inf if memory is None else to_amount("memory", memory, above_zero=True),
        delay=to_amount("delay", delay),
        overhead=to_amount("overhead", overhead),
        stages_per_rank=to_counts("stages_per_rank", stages_per_rank),
        bytes_per_parameter_byte=to_amount("bytes_per_parameter_byte", bytes_per_parameter_byte),
    )
    limits = Limits(
        seconds=to_amount("seconds", seconds, above_zero=True),
        effort=to_amount("effort", effort, above_zero=True),
        keep=to_count("keep", keep),
    )
    if isinstance(what, nn.Module):
        reason = "A model is given the whole batch, which is cut into microbatches."
        _refuse("mb_size", mb_size, reason)
        own = _read_model(what, batch, kwargs, layers, measure, speed, loss_fn, target)
        source: AbstractSource = LayerSource(own, request)
    else:
        given: dict[str, object] = {"kwargs": kwargs, "layers": layers, "loss_fn": loss_fn}
        given |= {"target": target, "measure": measure or None, "speed": speed}
        for name, value in given.items():
            _refuse(name, value, "It is for a model, but costs were given.")
        source = _read_costs(what, batch, mb_size, request)
    wanted = None if microbatches is None else to_counts("microbatches", microbatches)
    source, wanted = _with_lengths(source, lengths, work, wanted, request)
    return _gather(source, wanted, request).plan(limits)


def _read_model(
    model: nn.Module,
    batch: Any,
    kwargs: dict[str, Any] | None,
    layers: Sequence[Any] | None,
    measure: bool,
    speed: float | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    target: Any,
) -> LayersOfBatch:
    if measure:
        _refuse("speed", speed, "It is for counted costs, but measure is True.")
    args = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(args, tuple | list):
        raise CostError(
            f"batch is {batch!r}. Expected the model's arguments for a whole batch: a tuple of "
            "tensors, which may be on the meta device."
        )
    pace = 1.0 if speed is None else to_amount("speed", speed, above_zero=True)
    return ModelLayers(model, tuple(args), kwargs or {}, layers, measure, pace, loss_fn, target)


def _read_costs(what: Any, batch: Any, mb_size: int | None, request: Request) -> AbstractSource:
    if not isinstance(what, CostTable | Mapping | Sequence):
        raise CostError(
            f"what is {what!r}. Expected a model, a sequence of LayerCost, a CostTable, or one for "
            "each memory level."
        )
    if mb_size is None:
        raise CostError(
            "mb_size is missing. Give the number of samples in the microbatch for which the costs "
            "were counted or measured."
        )
    sizes = to_count("mb_size", mb_size), to_count("batch", batch)
    if isinstance(what, CostTable):
        return TableSource(what, *sizes, request)
    if isinstance(what, Mapping):
        return LevelSource(what, *sizes, request)
    return LayerSource(GivenLayers(what, *sizes), request)


def _with_lengths(
    source: AbstractSource,
    lengths: Lengths | None,
    work: Work | None,
    wanted: list[int] | None,
    request: Request,
) -> tuple[AbstractSource, list[int] | None]:
    """Return the source and the number of microbatches for these lengths, if they are given."""
    if lengths is None:
        if work is not None:
            raise CostError(f"work is {work!r}, but there are no lengths. Give lengths too.")
        return source, wanted
    if request.overhead > 0:
        raise CostError(
            f"overhead is {request.overhead:g}, but lengths are given, which scale the whole time "
            "of an action. Leave one of them out."
        )
    sized = SizedSource(source, lengths, Work() if work is None else work, request.memory)
    count = sized.num_microbatches
    if wanted not in (None, [count]):
        raise CostError(
            f"microbatches is {wanted}, but {count} lengths are given. Expected one length per "
            "microbatch: leave microbatches out."
        )
    return sized, [count]


def _refuse(name: str, value: object, reason: str) -> None:
    if value is not None:
        raise CostError(f"{name} is {value!r}. {reason} Leave it out.")


class _Gathered:
    """The choices so far, and the shapes for which there is no choice."""

    def __init__(self, source: AbstractSource) -> None:
        self._source = source
        self.choices: list[Choice] = []
        self.refused: dict[tuple[int, Placement], Refusal] = {}

    @property
    def lacks_memory(self) -> bool:
        """True if there is no choice, but there would be with more memory."""
        return not self.choices and any(no.least_memory < inf for no in self.refused.values())

    def add(self, counts: Iterable[int]) -> None:
        """Add all choices with these numbers of microbatches."""
        for count in counts:
            for placement in self._source.placements:
                found = self._find(count, placement)
                if isinstance(found, Refusal):
                    self.refused[count, placement] = found
                else:
                    self.choices += found

    def _find(self, count: int, placement: Placement) -> list[Choice] | Refusal:
        batch_size = self._source.batch_size
        if batch_size % count:
            return Refusal(f"a batch of {batch_size} cannot be cut into {count} equal microbatches")
        return self._source.choices(count, placement)

    def plan(self, limits: Limits) -> Plan:
        outcome = choose(self.choices, limits)
        return Plan(
            rows=tuple(_row(found, self._source.batch_size) for found in outcome.found),
            left_out=tuple(LeftOut(*shape, no.reason) for shape, no in self.refused.items()),
            num_considered=len(self.choices),
            lower_bound=outcome.lower_bound,
            is_complete=outcome.is_complete,
        )


def _gather(source: AbstractSource, wanted: list[int] | None, request: Request) -> _Gathered:
    """Return the choices for the numbers of microbatches `wanted`, or for suitable ones.

    Raise an error if there are none.
    """
    gathered = _Gathered(source)
    counts = wanted or choose_counts(source.batch_size, request.num_ranks)
    gathered.add(counts)
    more = larger_counts(source.batch_size, counts[-1]) if wanted is None else []
    while more and gathered.lacks_memory:
        gathered.add([more.pop(0)])
    if not gathered.choices:
        raise _no_plan(gathered.refused, source.batch_size, request.memory)
    return gathered


def _row(found: Found, batch_size: int) -> PlanRow:
    choice = found.choice
    return PlanRow(
        num_microbatches=choice.num_microbatches,
        mb_size=batch_size // choice.num_microbatches,
        placement=choice.placement,
        partition=choice.partition,
        cut_points=choice.cut_points,
        costs=choice.costs,
        parameter_memory=choice.parameter_memory,
        result=found.result,
        levels=choice.levels,
    )


def _no_plan(
    refused: dict[tuple[int, Placement], Refusal], batch_size: int, memory: float
) -> ScheduleError:
    """Return the error for no choices, with the least memory that fits or every reason."""
    (count, placement), nearest = min(refused.items(), key=lambda item: item[1].least_memory)
    if nearest.least_memory == inf:
        reasons = dict.fromkeys(refusal.reason for refusal in refused.values())
        return ScheduleError(
            f"There is no plan: {'; '.join(reasons)}. Give other microbatches, fewer ranks or "
            "stages_per_rank, or a model with more layers."
        )
    cut = f", cut at {', '.join(nearest.cut_points)}" if nearest.cut_points else ""
    return ScheduleError(
        f"No plan fits: memory is {in_full(memory)} on each rank. The smallest found that fits is "
        f"{in_full(nearest.least_memory)}: with {count} microbatches of {batch_size // count}, "
        f"{describe(placement)}{cut}. Allow that, or use more ranks"
        f"{' or more microbatches' if count < batch_size else ''}."
    )
