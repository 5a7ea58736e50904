"""Values that pipelines exchange whose ranks take part in common collectives.

Replicas of a stage reduce its gradients together, and the ranks of a tensor-parallel stage compute
together, each in its own pipeline. `groups` are the ranks that hold the same stage in other
pipelines: one group for each dimension of their mesh, in an order that is the same on all ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.comm.plain_values import of_bytes, to_bytes
from penstock.comm.timed_collectives import all_gather
from penstock.errors import CommError

Value = TypeVar("Value")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Failure:
    """The report of a decision that failed."""

    report: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold this rank's stages in other pipelines; falsy if there are none."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device
    timeout_s: float

    @classmethod
    def of(
        cls, groups: Iterable[dist.ProcessGroup], device: torch.device, timeout_s: float
    ) -> "Peers":
        """Take groups that may be in any order, and may join the same ranks twice."""
        by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        ordered = sorted(
            (len(ranks), ranks[1] - ranks[0], ranks) for ranks in by_ranks if len(ranks) > 1
        )
        return cls(tuple(by_ranks[ranks] for *_, ranks in ordered), device, timeout_s)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def gather(self, value: Value, what: str) -> list[Value]:
        """Return the values of all pipelines, in one order. All of them must call it.

        `what` says what they wait for, in error messages.
        """
        found = [value]
        for group in self.groups:
            found = [value for row in self._gather(found, group, what) for value in row]
        return found

    def decide(self, value: Value, choose: Callable[[list[Value]], Result], what: str) -> Result:
        """Return what the first pipeline chooses from the values of all. All must call it."""
        values = self.gather(value, what)
        if not all(dist.get_rank(group) == 0 for group in self.groups):
            chosen: Any = self.gather(None, what)[0]
            if isinstance(chosen, _Failure):
                raise CommError(
                    f"stopped waiting for {what}, because it failed in another replica: "
                    f"{chosen.report}. Look at the first error of each."
                )
            result: Result = chosen
            return result
        try:
            result = choose(values)
        except Exception as error:
            self.gather(_Failure(f"{type(error).__name__}: {error}"), what)
            raise
        self.gather(result, what)
        return result

    def _gather(self, value: Any, group: dist.ProcessGroup, what: str) -> list[Any]:
        expected = "all of them, which hold the same stages, to run the same steps"
        gather = partial(
            all_gather, group=group, timeout_s=self.timeout_s, what=what, expected=expected
        )
        body = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8).to(self.device)
        counts = gather(torch.tensor([len(body)], device=self.device))
        sizes = [int(count.item()) for count in counts]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: len(body)] = body
        bodies = gather(padded)
        return [
            of_bytes(found[:size].cpu().numpy().tobytes())
            for found, size in zip(bodies, sizes, strict=True)
        ]
