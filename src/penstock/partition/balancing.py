"""Cut a model so that the slowest rank is as fast as possible."""

from collections.abc import Iterable
from fractions import Fraction

from penstock.errors import PartitionError
from penstock.ir.placement import Placement
from penstock.partition.checked_floats import to_float, to_floats
from penstock.partition.evening import even_out
from penstock.partition.layer_ranges import Partition
from penstock.partition.load import Limit, Load
from penstock.partition.memory_limit import MemoryLimit
from penstock.partition.paired_stages import cut_loop, cut_v
from penstock.partition.single_stages import least_maximum, most_even


def balance(
    costs: Iterable[float],
    num_stages: int,
    *,
    placement: Placement | None = None,
    memory: MemoryLimit | None = None,
    slack: float = 0.0,
    speeds: Iterable[float] | None = None,
) -> Partition:
    """Cut layers into `num_stages` stages so that the slowest rank costs as little as possible.

    `costs` has one number per layer, such as the time of its forward and backward. Each stage gets
    at least one layer. Without a `placement` each rank holds one stage.

    In the steady part of a step a rank runs all of its stages once for each microbatch, and the
    slowest rank decides the speed. So the cost of a rank counts, which is that of all its stages;
    the stages need not be equal.

    >>> balance([1, 1, 1, 1, 4], 3).stage_costs
    (2.0, 2.0, 4.0)
    >>> balance([1, 1, 1, 1, 4], 4, placement=Placement.v(2)).rank_costs
    (5.0, 3.0)
    >>> balance([1] * 12, 4, placement=Placement.v(2)).stage_costs
    (3.0, 3.0, 3.0, 3.0)

    `speeds` has one number per rank, if they differ: a layer costs as much as `costs` says on a
    rank of speed 1, and half of that on one of speed 2.

    >>> balance([1] * 8, 4, speeds=[1, 1, 0.5, 1]).starts
    (0, 3, 5, 6)

    The guarantee depends on the placement:

    - One stage per rank: no cut has a faster slowest rank. Of equally fast cuts, the result is the
      most even one: the one with the least sum of squares of the stages' costs.
    - Two stages per rank, in a loop or a V: no cut has a faster slowest rank. Of equally fast cuts,
      the result has the fastest slowest stage. With `slack`, the slowest rank may be slower by that
      share of its cost (0.02 is 2 %) if that makes the slowest stage faster. No cut within the
      slack has a faster slowest stage, and of those with the same slowest stage, none has a faster
      slowest rank. Within both, stages are made more even, one layer at a time. For any other
      placement `slack` has no effect.
    - Any other: no cut has a faster slowest stage, and the result is the most even of those; a cut
      with a faster slowest rank may exist. `memory` is only checked: a cut that fits may exist
      even if the check fails.

    Sums are exact, so the same input gives the same result everywhere.
    """
    each = to_floats("costs", costs, per="layer")
    _check_counts(len(each), num_stages)
    if placement is None:
        placement = Placement.linear(num_stages)
    _check_placement(placement, num_stages)
    share = Fraction(to_float("slack", slack))
    rates = _check_speeds(speeds, placement.num_ranks)
    by_rank = [[Fraction(cost) / rate for cost in each] for rate in map(Fraction, rates)]
    time = Load.of([by_rank[rank] for rank in placement.ranks])
    if memory is None:
        starts = _cut(time, Limit.none(time), placement, share)
        assert starts is not None, "without a limit there is always a cut"
    else:
        starts = _cut_within(memory, time, placement, share)
    return Partition(starts, each, placement, () if speeds is None else rates)


def _cut_within(
    memory: MemoryLimit, time: Load, placement: Placement, slack: Fraction
) -> tuple[int, ...]:
    if not isinstance(memory, MemoryLimit):
        raise PartitionError(
            f"memory is {memory!r}. Expected a MemoryLimit, which also has the layers' memory."
        )
    load = Load.of(memory.by_stage(time.num_layers, time.num_stages))
    limit = Limit(load, int(Fraction(memory.cap) / load.unit))
    starts = _cut(time, limit, placement, slack)
    if starts is None:
        lightest = _cut(load, Limit.none(load), placement, Fraction(0))
        assert lightest is not None, "without a limit there is always a cut"
        raise PartitionError(
            f"No cut into {time.num_stages} stages fits memory.cap, which is {memory.cap}. "
            f"Expected at least {load.to_float(max(load.of_ranks(lightest, placement)))}. "
            "Raise the cap, or use more ranks or fewer microbatches in flight."
        )
    by_rank = load.of_ranks(starts, placement)
    if max(by_rank) > limit.most:
        raise PartitionError(
            f"Rank {by_rank.index(max(by_rank))} would need {load.to_float(max(by_rank))} of "
            f"memory, but memory.cap is {memory.cap}. For this placement the stages are made "
            "equal, and the cap is only checked. Raise the cap, or place one stage on each rank, "
            "or two in a loop or a V: balance then looks for cuts that fit."
        )
    return starts


def _cut(load: Load, limit: Limit, placement: Placement, slack: Fraction) -> tuple[int, ...] | None:
    """Return the first layer of each stage; None if no cut stays within `limit`."""
    num_ranks = placement.num_ranks
    there, back = placement.ranks[:num_ranks], placement.ranks[num_ranks:]
    if len(set(there)) == num_ranks and back in (there, there[::-1]):
        cut = cut_v if back == there[::-1] else cut_loop
        starts = cut(load, limit, slack)
        return None if starts is None else even_out(load, limit, placement, starts)
    if back:  # Some rank has several stages, in a placement that no search here handles.
        limit = Limit.none(load)
    maximum = least_maximum(load, limit)
    return None if maximum is None else most_even(load, limit, maximum)


def _check_counts(num_layers: int, num_stages: int) -> None:
    if not isinstance(num_stages, int) or num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages!r}. Expected a whole number, at least 1.")
    if num_layers == 0:
        raise PartitionError("costs is empty. Give the cost of at least one layer.")
    if num_stages > num_layers:
        raise PartitionError(
            f"{num_layers} layers cannot be cut into {num_stages} stages. "
            "Each stage needs at least one layer: use fewer stages, or smaller layers."
        )


def _check_speeds(speeds: Iterable[float] | None, num_ranks: int) -> tuple[float, ...]:
    if speeds is None:
        return (1.0,) * num_ranks
    rates = to_floats("speeds", speeds, per="rank")
    if len(rates) != num_ranks or 0 in rates:
        raise PartitionError(
            f"speeds is {', '.join(map(str, rates)) or 'empty'}. Expected a positive number for "
            f"each of the {num_ranks} ranks."
        )
    return rates


def _check_placement(placement: Placement, num_stages: int) -> None:
    if not isinstance(placement, Placement):
        raise PartitionError(
            f"placement is {placement!r}. Expected a Placement, such as Placement.v(2)."
        )
    if placement.num_stages != num_stages:
        raise PartitionError(
            f"placement has {placement.num_stages} stages, but num_stages is {num_stages}. "
            "Expected the same number in both."
        )
