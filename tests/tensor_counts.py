"""How many tensors are alive, and how much memory this process has."""

import gc
import os
from collections.abc import Callable, Iterable
from itertools import pairwise

from torch import Tensor, nn


def live_tensors(*, but: Iterable[Tensor] = ()) -> list[Tensor]:
    """The tensors that Python knows of, without those in `but`."""
    gc.collect()
    known = {id(tensor) for tensor in but}
    # By type(): isinstance() asks the objects, some of which are there to warn whoever asks.
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor) and id(x) not in known]


def weights_and_grads(modules: Iterable[nn.Module]) -> list[Tensor]:
    params = [param for module in modules for param in module.parameters()]
    return params + [param.grad for param in params if param.grad is not None]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_of(
    step: Callable[[], object], *, num_steps: int = 120, num_warm: int = 40
) -> tuple[int, int]:
    """Runs many steps, twice; returns by how many tensors and bytes the process grew at least.

    What is made once does not count: there is a warm-up for caches of torch and Python, and what
    the allocator takes from the system in one of the two runs it does not take in the other.
    """
    for _ in range(num_warm):
        step()
    counts = [(len(live_tensors()), resident_bytes())]
    for _ in range(2):
        for _ in range(num_steps):
            step()
        counts.append((len(live_tensors()), resident_bytes()))
    step()  # Ranks in one process may have begun the next step each time, or never.
    tensors, memory = zip(*counts, strict=True)
    return (
        max(after - before for before, after in pairwise(tensors)),
        min(after - before for before, after in pairwise(memory)),
    )
