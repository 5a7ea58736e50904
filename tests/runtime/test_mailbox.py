"""A step's messages are let go of as soon as the schedule proves that they have been received."""

from typing import Any

import torch
from torch import nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage
from penstock.ir import Backward

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
