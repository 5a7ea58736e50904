"""What travels for tied parameters: nothing without need, and what is said while it is awaited."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from local_steps import FOUR_STAGES, NUM_STAGES
from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.comm import AbstractComm, Transfer
from penstock.comm.channels import both_ways
from penstock.errors import CommError
from penstock.ir.message import Channel
from penstock.runtime.tied_parameters import TiedGrads, Ties
from stage_training import CPU
from tied_models import TiedStage, loss_fn, tied_batch, tied_stage, tied_stages

TiedOf = Callable[[TiedStage], dict[str, str]]


class CountingComm(AbstractComm):
    """Counts the messages that it sends by another one."""

    def __init__(self, comm: AbstractComm) -> None:
        self.rank, self.num_ranks, self.place = comm.rank, comm.num_ranks, comm.place
        self.num_sent = 0
        self._comm = comm

    def gather(self, value: Any) -> list[Any]:
        return self._comm.gather(value)

    def open(self, channels: Iterable[Channel]) -> None:
        self._comm.open(channels)

    def copies(self, receiver: int) -> bool:
        return self._comm.copies(receiver)

    def send(self, tensor: Tensor, receiver: int) -> Transfer:
        self.num_sent += 1
        return self._comm.send(tensor, receiver)

    def recv(self, tensor: Tensor, sender: int) -> Transfer:
        return self._comm.recv(tensor, sender)

    def fail(self, report: str) -> None:
        self._comm.fail(report)

    def close(self) -> None:
        self._comm.close()


def count_on_rank(group: LocalGroup, tied_of: TiedOf, num_rounds: int = 2) -> tuple[int, int]:
    """How many messages a rank sends in a step, and in an eval; the first ones are left out."""
    schedule = FOUR_STAGES["1F1B"]
    comm = CountingComm(group.connect())
    group.connect = lambda: comm  # type: ignore[method-assign]  # There is no other way in.
    module = tied_stages(NUM_STAGES)[group.rank]
    tied = tied_of(module)
    stage = PipelineStage(module, group.rank, NUM_STAGES, CPU, group=group, tied=tied)
    pipeline = Pipeline(stage, schedule, loss_fn=loss_fn)
    tokens, target = tied_batch(8, 0)
    for _ in range(num_rounds):
        before_step = comm.num_sent
        pipeline.step(tokens, target=target)
        before_eval = comm.num_sent
        pipeline.eval(tokens, target=target)
    return before_eval - before_step, comm.num_sent - before_eval


def count(tied_of: TiedOf) -> tuple[int, int]:
    """The same of all ranks together."""
    steps, evals = zip(*local_ranks(NUM_STAGES, count_on_rank, tied_of), strict=True)
    return sum(steps), sum(evals)


def test_messages_of_an_exchange_are_those_of_a_step() -> None:
    # Over three edges, for four microbatches: activations, and in a step their gradients.
    steps, evals = 24, 12
    assert (steps, evals) == count(lambda module: {})
    # Each pair of ranks that hold a name sends flags and gradients, both ways: the embedding's
    # ranks are 0 and 3, the mixture's 0, 2 and 3.
    flags, embeddings, mixtures = 6, 2, 6
    assert (steps + flags + embeddings + mixtures, evals) == count(lambda module: module.tied)


def test_name_that_only_one_stage_holds_needs_no_message() -> None:
    assert (24, 12) == count(lambda module: {"head.weight": "alone"} if module.head else {})


def test_wait_for_a_gradient_says_for_which_and_from_whom() -> None:
    def main(group: LocalGroup) -> None:
        comm = group.connect()
        comm.open(both_ways([(0, 1)]))
        if group.rank == 1:  # Announces a gradient, and sends none.
            comm.send(torch.ones(1, dtype=torch.uint8), 0)
            return
        stage = PipelineStage(
            tied_stage(0, 2), 0, 2, CPU, group=group, tied={"embed.weight": "words"}
        )
        ties = Ties({"words": (0, 1)}, {1: ("words",)}, frozenset({0}))
        TiedGrads(ties, {0: stage}, comm).exchange()

    with pytest.raises(CommError) as caught:
        local_ranks(2, main)
    expected = "rank 0 stopped waiting for the gradient of tied parameter 'words' from rank 1, "
    assert str(caught.value).startswith(expected)
