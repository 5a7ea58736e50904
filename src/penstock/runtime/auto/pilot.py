"""What decides which schedule a pipeline runs, where that is found out while it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from penstock.comm import AbstractComm
from penstock.errors import AgreementError
from penstock.ir import Message, Placement, Schedule, StageId
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form


class AbstractPilot(ABC):
    """Chooses the schedule of each step. Every rank has one, and all of them choose alike."""

    @property
    @abstractmethod
    def options(self) -> str:
        """What must be the same on all ranks, in words."""

    @abstractmethod
    def start(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Schedule:
        """The ranks have met; returns the schedule of the first step."""

    @abstractmethod
    def make_observer(self) -> Observer:
        """What is to watch the next step."""

    @abstractmethod
    def end_step(self, observer: Observer, forms: Mapping[Message, Form]) -> Schedule:
        """A step has ended; returns the schedule of the next. It may talk to the other ranks."""


def gathered_placement(held: Sequence[Sequence[StageId]], num_stages: int) -> Placement:
    """The placement by which each rank holds the stages that it was given."""
    ranks_of: list[list[int]] = [[] for _ in range(num_stages)]
    for rank, stages in enumerate(held):
        for stage in stages:
            ranks_of[stage].append(rank)
    for stage, ranks in enumerate(ranks_of):
        if len(ranks) != 1:
            found = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank"
            raise AgreementError(
                f"stage {stage} was given to {found}. Expected each of the {num_stages} stages on "
                "exactly one rank."
            )
    return Placement(ranks[0] for ranks in ranks_of)
