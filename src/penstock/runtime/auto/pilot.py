"""The pilot, which chooses the schedules of a pipeline while it runs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from penstock.comm import AbstractComm
from penstock.errors import AgreementError
from penstock.ir import Message, Placement, Schedule, StageId
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form


class AbstractPilot(ABC):
    """A pilot, which chooses the schedule of each step. All ranks' pilots choose the same."""

    @property
    @abstractmethod
    def options(self) -> str:
        """The options that must be the same on all ranks, in words."""

    @abstractmethod
    def start(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Schedule:
        """Start once the ranks have met; return the schedule of the first step."""

    def foresee(self) -> Mapping[Message, Form] | None:
        """Return the forms of a step's messages, if they are known before it."""
        return None

    @abstractmethod
    def make_observer(self) -> Observer:
        """Return the observer of the next step."""

    @abstractmethod
    def end_step(
        self, observer: Observer, forms: Mapping[Message, Form], work: Sequence[float]
    ) -> Schedule:
        """End a step, perhaps with messages to other ranks; return the schedule of the next.

        `work` is that of each microbatch as they ran; empty if it is not known.
        """


def gathered_placement(held: Sequence[Sequence[StageId]], num_stages: int) -> Placement:
    """Return the placement in which each rank holds the stages that it was given."""
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
