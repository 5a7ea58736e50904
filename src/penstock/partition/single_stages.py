"""Each stage by itself: dynamic programming over the stages and the ends of their layers.

O(stages x layers x layers of the longest stage). Steps that the code cites:
[1] from the last layer of a stage backwards, the stage only gets heavier, so the search stops at
    the first start that is too heavy;
[2] of equally good starts, the last is taken, so that the later stages are shorter.
"""

from penstock.partition.load import Limit, Load


def least_maximum(load: Load, limit: Limit) -> int | None:
    """Return the least load of the heaviest stage; None if no cut stays within `limit`."""
    # best[end]: the heaviest of the stages so far, if they end before layer `end`.
    best: list[int | None] = [0] + [None] * load.num_layers
    for sums, limited in zip(load.sums, limit.load.sums, strict=True):
        found: list[int | None] = [None] * (load.num_layers + 1)
        for end in range(1, load.num_layers + 1):
            least: int | None = None
            for start in range(end - 1, -1, -1):
                weight = sums[end] - sums[start]
                if limited[end] - limited[start] > limit.most:  # [1]
                    break
                if least is not None and weight >= least:  # [1]
                    break
                before = best[start]
                if before is not None and (least is None or max(before, weight) < least):
                    least = max(before, weight)
            found[end] = least
        best = found
    return best[-1]


def most_even(load: Load, limit: Limit, maximum: int) -> tuple[int, ...]:
    """Return the first layer of each stage, where none carries more than `maximum`.

    Of all such cuts it is the one with the least sum of squares. There must be one.
    """
    best: list[int | None] = [0] + [None] * load.num_layers
    starts_by_stage: list[list[int]] = []
    for sums, limited in zip(load.sums, limit.load.sums, strict=True):
        found: list[int | None] = [None] * (load.num_layers + 1)
        starts = [0] * (load.num_layers + 1)
        for end in range(1, load.num_layers + 1):
            least: int | None = None
            for start in range(end - 1, -1, -1):
                weight = sums[end] - sums[start]
                if weight > maximum or limited[end] - limited[start] > limit.most:  # [1]
                    break
                before = best[start]
                if before is None:
                    continue
                squares = before + weight * weight
                if least is None or squares < least:  # [2]
                    least, starts[end] = squares, start
            found[end] = least
        best = found
        starts_by_stage.append(starts)
    assert best[-1] is not None, "no cut keeps to the maximum"
    return _way_back(starts_by_stage, load.num_layers)


def _way_back(starts_by_stage: list[list[int]], num_layers: int) -> tuple[int, ...]:
    chosen = [num_layers]
    for starts in reversed(starts_by_stage):
        chosen.append(starts[chosen[-1]])
    return tuple(reversed(chosen[1:]))
