"""Jackson's rule: the least time of one rank whose actions have heads and tails."""

import heapq
from collections.abc import Sequence
from math import inf


def longest_tail_first(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Return when all tails end if sorted jobs (head, duration, tail) run by Jackson's rule."""
    waiting: list[tuple[float, float]] = []  # The negative tail, and the rest of the duration.
    now, latest, index = 0.0, -inf, 0
    while index < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            heapq.heappush(waiting, (-jobs[index][2], jobs[index][1]))
            index += 1
        tail, left = heapq.heappop(waiting)
        until = jobs[index][0] if index < len(jobs) else inf
        if now + left > until:
            heapq.heappush(waiting, (tail, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - tail)
    return latest
