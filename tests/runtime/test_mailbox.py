"""A step's messages: posted ahead, and let go of once the schedule proves them received."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from bare_steps import run_bare_steps
from penstock import LocalGroup, Pipeline, PipelineStage, schedules
from penstock.comm import AbstractComm, Describe, Transfer
from penstock.comm.abstract_comm import BEGINNING
from penstock.ir import Backward
from penstock.ir.message import Channel
from penstock.runtime.program import make_program

NUM_MICROBATCHES = 8


def test_sent_activation_is_released_when_its_gradient_comes_back() -> None:
    """1F1B on two ranks: before its k-th backward, rank 0 has sent k + 2 activations.

    Rank 1 sent gradient k after its forward k, so k + 1 of them have arrived, and one is under way.
    """
    held: list[int] = []

    def count(action: Backward, context: Any) -> None:
        context.run(action)
        held.append(sum(len(outbox.sent) for outbox in context.mailbox._outboxes.values()))

    def main(group: LocalGroup) -> None:
        stage = PipelineStage(nn.Linear(4, 4), group.rank, 2, "cpu", group=group)
        loss_fn = nn.functional.mse_loss
        pipeline = Pipeline(stage, "1F1B", num_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn)
        x, target = torch.randn(NUM_MICROBATCHES, 4), torch.randn(NUM_MICROBATCHES, 4)
        pipeline.step(x, target=target)  # Later ones send no forms.
        if group.rank == 0:
            pipeline.register_custom_function(Backward, count)
        pipeline.step(x, target=target)

    penstock.local_ranks(2, main)
    assert [1] * (NUM_MICROBATCHES - 1) + [0] == held


def test_sent_tensor_that_was_copied_is_not_held() -> None:
    """It was held until a message came back: with recomputation, as much as the inputs are."""
    held: list[bool] = []

    def look(action: Backward, context: Any) -> None:
        sent = [kept for outbox in context.mailbox._outboxes.values() for kept in outbox.sent]
        held.extend(tensor is not None for _, _, tensor, _ in sent)
        context.run(action)

    def main(group: LocalGroup) -> None:
        stage = PipelineStage(nn.Linear(4, 4), group.rank, 2, "cpu", group=group)
        pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=nn.functional.mse_loss)
        pipeline.register_custom_function(Backward, look)
        pipeline.step(torch.randn(2, 4), target=torch.randn(2, 4))

    penstock.local_ranks(2, main)
    assert held
    assert not any(held)


class Watched(AbstractComm):
    """Passes all on to another comm, and notes what has not been waited for."""

    def __init__(self, comm: AbstractComm) -> None:
        self.rank, self.num_ranks, self.place = comm.rank, comm.num_ranks, comm.place
        self._comm = comm
        self.num_sending = self.num_posted = self.most_posted = 0

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        return self._comm.gather(value, what)

    def open(self, channels: Iterable[Channel]) -> None:
        self._comm.open(channels)

    def copies(self, receiver: int) -> bool:
        return self._comm.copies(receiver)

    def send(self, tensor: Tensor, receiver: int) -> Transfer:
        self.num_sending += 1
        return Noted(self._comm.send(tensor, receiver), self.note_sent)

    def recv(self, tensor: Tensor, sender: int) -> Transfer:
        self.num_posted += 1
        self.most_posted = max(self.most_posted, self.num_posted)
        return Noted(self._comm.recv(tensor, sender), self.note_received)

    def note_sent(self) -> None:
        self.num_sending -= 1

    def note_received(self) -> None:
        self.num_posted -= 1

    def fail(self, report: str) -> None:
        self._comm.fail(report)

    def close(self) -> None:
        self._comm.close()


class Noted:
    """A transfer that tells when it has been waited for."""

    def __init__(self, transfer: Transfer, note: Callable[[], None]) -> None:
        self._transfer, self._note = transfer, note

    def wait(self, described: Describe) -> None:
        self._transfer.wait(described)
        self._note()


def test_next_message_is_posted_before_one_is_waited_for_and_all_sends_are_waited_for() -> None:
    schedule = schedules.get("1F1B")(num_ranks=2, num_microbatches=4)

    def main(group: LocalGroup) -> tuple[int, int, int]:
        comm = Watched(group.connect())
        comm.open(make_program(schedule, comm.rank).channels)
        run_bare_steps(comm, schedule)
        return comm.num_sending, comm.num_posted, comm.most_posted

    assert [(0, 0, 2)] * 2 == penstock.local_ranks(2, main)
