"""A pipeline that takes over from another one, between two steps, with other stages."""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from penstock.ir import Rank, StageId
from penstock.ir.message import Channel
from penstock.runtime.pipeline import Pipeline

Moves: TypeAlias = Sequence[tuple[Rank, Tensor]]
"""Contiguous tensors, each with the rank that it goes to, or comes from."""


def stage_times(pipeline: Pipeline) -> dict[StageId, float]:
    """Return the seconds that each stage of this rank takes in a step; empty if not measured."""
    return pipeline._runner.stage_times


def has_open_grads(pipeline: Pipeline) -> bool:
    """Return whether the last step left gradients for a later one to complete."""
    return pipeline._runner.are_grads_open


def exchange(pipeline: Pipeline, sent: Moves, received: Moves) -> None:
    """Send some tensors to other ranks, and fill others; all ranks must call it.

    What one rank sends to another must come in the order in which that one receives it.
    """
    with pipeline._connection.failing_together("in moving layers between ranks") as comm:
        outgoing = {Channel(comm.rank, rank) for rank, _ in sent}
        comm.open(outgoing | {Channel(rank, comm.rank) for rank, _ in received})
        transfers = [(rank, comm.recv(tensor, rank)) for rank, tensor in received]
        transfers += [(rank, comm.send(tensor, rank)) for rank, tensor in sent]
        for rank, transfer in transfers:
            transfer.wait(partial("a tensor that moves from or to rank {}".format, rank))


def take_over(successor: Pipeline, pipeline: Pipeline) -> None:
    """Give a new pipeline what was set on the old one, and end that."""
    successor._settings = pipeline._settings
    pipeline.close()
