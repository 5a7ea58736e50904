"""Several ranks in one process, for tests, notebooks and debugging.

Each rank is a thread, and one runs at a time: it runs until it has to wait for another rank, and
then the next rank that can go on runs. So every run is the same. If no rank can go on, all of them
get an error at once, without waiting for a deadline.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.comm.abstract_comm import (
    BEGINNING,
    AbstractComm,
    Describe,
    Transfer,
    as_bytes,
    copy_of,
)
from penstock.comm.channels import OpenChannels
from penstock.errors import CommError, StageError
from penstock.ir import Rank
from penstock.ir.message import Channel
from penstock.watch.place import Place

Result = TypeVar("Result")


class LocalGroup:
    """One rank among those of `local_ranks`; give it to a stage as its `group`."""

    def __init__(self, world: "_World", rank: Rank) -> None:
        self.rank = rank
        self.num_ranks = world.num_ranks
        self._world = world

    def __repr__(self) -> str:
        return f"LocalGroup(rank {self.rank} of {self.num_ranks})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalGroup":
        """Return the same group: a copy of a stage communicates with the same ranks."""
        return self

    def connect(self) -> AbstractComm:
        """Return this rank's ends of the channels of one pipeline."""
        return _LoopbackComm(self._world, self.rank)


def local_ranks(num_ranks: int, main: Callable[..., Result], *args: Any) -> list[Result]:
    """Run `main(group, *args)` once for each rank, in this process; return all results.

    `group.rank` and `group.num_ranks` tell the ranks apart, and `group` is what a stage takes as
    its group. If a rank fails, so do those that wait for it, and its exception is raised here.

        >>> import torch, penstock
        >>> def main(group):
        ...     layer = torch.nn.Linear(4, 4)
        ...     stage = penstock.PipelineStage(
        ...         layer, group.rank, group.num_ranks, torch.device("cpu"), group=group)
        ...     schedule = penstock.schedules.get("1F1B")(num_ranks=2, num_microbatches=4)
        ...     pipeline = penstock.Pipeline(stage, schedule, loss_fn=torch.nn.functional.mse_loss)
        ...     pipeline.step(torch.randn(8, 4), target=torch.randn(8, 4))
        ...     return layer.weight.grad.shape
        >>> local_ranks(2, main)
        [torch.Size([4, 4]), torch.Size([4, 4])]
    """
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise StageError(f"num_ranks is {num_ranks!r}. Expected a whole number, at least 1.")
    world = _World(num_ranks)
    ranks = [_RankThread(world, LocalGroup(world, rank), main, args) for rank in range(num_ranks)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    failed = [thread.error for thread in ranks if thread.error is not None]
    if failed:
        # A CommError only follows from the failure of another rank.
        raise next((error for error in failed if not isinstance(error, CommError)), failed[0])
    return [thread.result for thread in ranks]


class _RankThread(threading.Thread, Generic[Result]):
    """The thread that runs `main` for one rank, when it is its turn."""

    result: Result

    def __init__(
        self, world: "_World", group: LocalGroup, main: Callable[..., Result], args: tuple[Any, ...]
    ) -> None:
        super().__init__(name=f"rank {group.rank}", daemon=True)
        self.error: BaseException | None = None
        self._world, self._group, self._main, self._args = world, group, main, args

    def run(self) -> None:
        rank = self._group.rank
        self._world.begin(rank)
        try:
            self.result = self._main(self._group, *self._args)
        except BaseException as error:
            self.error = error
            self._world.fail(rank, f"{type(error).__name__}: {error}")
        finally:
            self._world.end(rank)


class _World:
    """The state that the ranks share: whose turn it is, who waits for what, and the pipelines."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ended = _Line()
        self._lines: list[_Line] = []
        self._num_lines = [0] * num_ranks
        self._turn = 0
        self._turns = threading.Condition()
        self._waiting: dict[Rank, _Wait] = {}
        self._running = set(range(num_ranks))

    def next_line(self, rank: Rank) -> "_Line":
        """Return the line of the rank's next pipeline; ranks match their pipelines by number."""
        number = self._num_lines[rank]
        self._num_lines[rank] += 1
        if number == len(self._lines):
            self._lines.append(_Line())
        return self._lines[number]

    def begin(self, rank: Rank) -> None:
        with self._turns:
            self._turns.wait_for(lambda: self._turn == rank)

    def fail(self, rank: Rank, report: str) -> None:
        """Note that a rank has ended in an exception, so that no rank keeps waiting for it."""
        self._ended.fail(f"rank {rank} failed: {report}")

    def end(self, rank: Rank) -> None:
        with self._turns:
            self._running.remove(rank)
            self._pass_on(rank)

    def wait_until(
        self, rank: Rank, line: "_Line", is_ready: Callable[[], bool], described: Describe
    ) -> None:
        """Let other ranks run until `is_ready()`."""
        if is_ready():
            return
        with self._turns:
            self._waiting[rank] = _Wait(line, is_ready, described)
            self._pass_on(rank)
            self._turns.wait_for(lambda: self._turn == rank)
            del self._waiting[rank]
        if not is_ready():
            reason = line.failure or self._ended.failure
            raise CommError(f"rank {rank} stopped waiting for {described()}, because {reason}")

    def _pass_on(self, rank: Rank) -> None:
        """Give the turn to the next rank that can go on."""
        others = [(rank + step) % self.num_ranks for step in range(1, self.num_ranks + 1)]
        alive = [other for other in others if other in self._running]
        ready = [other for other in alive if self._can_go_on(other)]
        if alive and not ready:
            waits = "; ".join(
                f"rank {other} waits for {wait.described()}"
                for other, wait in sorted(self._waiting.items())
            )
            self._ended.fail(f"no rank can go on: {waits}")
            ready = alive
        if ready:
            self._turn = ready[0]
            self._turns.notify_all()

    def _can_go_on(self, rank: Rank) -> bool:
        wait = self._waiting.get(rank)
        return wait is None or bool(wait.line.failure or self._ended.failure) or wait.is_ready()


class _Line:
    """The state that the ranks of one pipeline share: their messages, and the first failure."""

    def __init__(self) -> None:
        self.mailboxes: defaultdict[Channel, _Mailbox] = defaultdict(_Mailbox)
        self.gathered: defaultdict[int, dict[Rank, Any]] = defaultdict(dict)
        self.failure = ""

    def fail(self, report: str) -> None:
        """Note a failure; only the first is kept, since the others follow from it."""
        self.failure = self.failure or report


class _Wait(NamedTuple):
    line: _Line
    is_ready: Callable[[], bool]
    described: Describe


class _LoopbackComm(AbstractComm):
    def __init__(self, world: _World, rank: Rank) -> None:
        self.rank = rank
        self.num_ranks = world.num_ranks
        self.place = Place.unread()
        self._world = world
        self._line = world.next_line(rank)
        self._num_gathers = 0
        self._channels = OpenChannels(rank)

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        values = self._line.gathered[self._num_gathers]
        self._num_gathers += 1
        values[self.rank] = value
        self._world.wait_until(
            self.rank,
            self._line,
            lambda: len(values) == self.num_ranks,
            lambda: f"all ranks {what}",
        )
        return [values[rank] for rank in range(self.num_ranks)]

    def open(self, channels: Iterable[Channel]) -> None:
        # Mailboxes need no connection, but channels that are not open would fail on other links.
        self._channels.open(channels, connect=lambda channel: None)

    def copies(self, receiver: Rank) -> bool:
        return True

    def needs_every_wait(self, other: Rank) -> bool:
        return False

    def send(self, tensor: Tensor, receiver: Rank) -> Transfer:
        self._channels.check(self.rank, receiver)
        # A copy, as between processes: the sender may change its own tensor.
        self._line.mailboxes[Channel(self.rank, receiver)].put(copy_of(tensor))
        return _SENT

    def recv(self, tensor: Tensor, sender: Rank) -> Transfer:
        self._channels.check(sender, self.rank)
        posted = _Posted(self._world, self._line, self.rank, tensor)
        self._line.mailboxes[Channel(sender, self.rank)].post(posted)
        return posted

    def fail(self, report: str) -> None:
        self._line.fail(f"rank {self.rank} failed: {report}")

    def close(self) -> None:
        """Do nothing: the mailboxes end with the threads."""


class _Sent:
    def wait(self, described: Describe) -> None:
        """Return at once: the mailbox has a copy, so the sender's tensor is free."""


_SENT = _Sent()


class _Posted:
    """A posted receive; the receives of a channel are filled in order."""

    def __init__(self, world: _World, line: _Line, rank: Rank, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._world, self._line, self._rank = world, line, rank

    def wait(self, described: Describe) -> None:
        self._world.wait_until(self._rank, self._line, lambda: self.tensor is None, described)


class _Mailbox:
    """One channel: the sent tensors and the posted receives, in order; one list is empty."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()
        self._posted: deque[_Posted] = deque()

    def put(self, tensor: Tensor) -> None:
        self._sent.append(tensor)
        self._deliver()

    def post(self, posted: _Posted) -> None:
        self._posted.append(posted)
        self._deliver()

    def _deliver(self) -> None:
        if self._sent and self._posted:
            posted = self._posted.popleft()
            assert posted.tensor is not None
            sent = self._sent.popleft()
            # As strict as a real link; copy_ would broadcast and convert.
            assert (sent.shape, sent.dtype) == (posted.tensor.shape, posted.tensor.dtype)
            with torch.no_grad():
                as_bytes(posted.tensor).copy_(as_bytes(sent))
            posted.tensor = None
