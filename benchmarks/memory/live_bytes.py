"""The bytes that torch's CPU allocator has given out in a step, at every moment of it.

torch's profiler reports each allocation and each free of the CPU allocator, with its exact size.
So this counts the memory of every tensor, whoever made it: activations, gradients, buffers of
messages and what an operation needs while it runs. It does not count Python's own objects, nor
what libraries allocate for themselves, such as the buffers of sockets.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

ACTION = "action: "
"""What the names of marked events begin with: each is one action of a schedule."""


@dataclass(frozen=True)
class LiveBytes:
    """What was allocated since the step began and not freed, in bytes."""

    peak: int
    held: int
    """The peak at the ends of marked actions; 0 if there are none."""
    working: int
    """The most that an action had beyond both what was live before and what was live after it."""
    left: int
    """What was still there at the end."""


def count_live_bytes(step: Callable[[], object]) -> LiveBytes:
    """Run a step and count. What the step returns is dropped before the count ends."""
    gc.collect()
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        step()
        gc.collect()
    found = profiled.profiler
    assert found is not None
    assert found.kineto_results is not None
    changes: list[tuple[int, int]] = []
    actions: list[tuple[int, int]] = []
    for event in found.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(ACTION):
            actions.append((event.start_ns(), event.end_ns()))
    return _follow(sorted(changes, key=lambda change: change[0]), sorted(actions))


def _follow(changes: list[tuple[int, int]], actions: list[tuple[int, int]]) -> LiveBytes:
    """Go through the changes in order of time, each a time and a number of bytes."""
    live = peak = held = working = place = 0

    def go_to(time_ns: float) -> int:
        nonlocal live, peak, place
        highest = live
        while place < len(changes) and changes[place][0] <= time_ns:
            live += changes[place][1]
            highest = max(highest, live)
            place += 1
        peak = max(peak, highest)
        return highest

    for start_ns, end_ns in actions:
        go_to(start_ns)
        before = live
        highest = go_to(end_ns)
        held = max(held, live)
        working = max(working, highest - max(before, live))
    go_to(float("inf"))
    return LiveBytes(peak, held, working, live)
