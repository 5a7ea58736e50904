"""A pipeline's connection to the other ranks, with which it meets and fails together."""

from collections.abc import Callable

import torch

from penstock.comm import AbstractComm, DryGroup, LocalGroup, ProcessGroupComm
from penstock.comm.dry_run import fake_group_comm, is_dry_run
from penstock.errors import CommError
from penstock.ir import Rank
from penstock.stage.stage_checks import StageGroup

PREPARING = "in preparing a step"


class Connection:
    """The channels to the other ranks of a group, from the first use to the first failure.

    `meet` is called once the channels exist; all ranks call it at the same time.
    """

    def __init__(
        self,
        group: StageGroup,
        rank: Rank,
        device: torch.device,
        timeout_s: float,
        meet: Callable[[AbstractComm], None],
        clean_up: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._meet = meet
        self._clean_up = clean_up
        self._comm: AbstractComm | None = None
        self._failure = ""
        self._doing = ""
        self._before = b""

    def failing_together(self, doing: str) -> "Connection":
        """Return a context that gives the channels; an error in it ends the pipeline on all ranks.

        `doing` says what the rank does in it, in words that follow a verb; the watch shows it to
        the others if this rank dies. It is this object: a context of its own for every step would
        take longer.
        """
        self._doing = doing
        return self

    def __enter__(self) -> AbstractComm:
        if self._failure:
            raise CommError(
                f"rank {self._rank}: this pipeline has ended ({self._failure}). "
                "Make a new pipeline on all ranks."
            )
        if self._comm is None:
            try:
                self._comm = self._connect()
                self._meet(self._comm)
            except BaseException as error:
                self._fail(error)
                raise
        self._before = self._comm.place.enter(self._doing)
        return self._comm

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._comm is not None:
            self._comm.place.go_back(self._before)
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        self._failure = f"{type(error).__name__}: {error}{notes}"
        if self._comm is not None:
            self._comm.fail(self._failure)
            self._comm = None
        self._clean_up(error)  # After the others were told, as it may wait.

    def close(self) -> None:
        """End the connection now; otherwise it ends with the last reference."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        self._failure = self._failure or "it was closed"

    def _connect(self) -> AbstractComm:
        if isinstance(self._group, LocalGroup | DryGroup):
            return self._group.connect()
        if is_dry_run(self._group):
            return fake_group_comm(self._group)
        return ProcessGroupComm(self._group, self._device, self._timeout_s)
