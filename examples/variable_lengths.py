"""Shows: documents of different lengths, packed into microbatches that run in a quick order.

`pack` balances the work of microbatches, and `step(work=…)` orders those that still differ. Each
document is a row of tokens; the loss is the mean over the tokens of all documents.
"""

import random

import torch
from torch import Tensor, nn

import penstock
from penstock.costs import Work

NUM_RANKS, NUM_MICROBATCHES, WIDTH = 2, 4, 16
WORK = Work.of_transformer(WIDTH)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def run_rank(group: penstock.LocalGroup) -> float:
    lengths = [random.Random(number).randint(4, 60) for number in range(11)]
    microbatches = penstock.pack(lengths, NUM_MICROBATCHES, work=WORK)
    tokens = [sum(lengths[number] for number in one) for one in microbatches]
    work = [sum(WORK(lengths[number]) for number in one) for one in microbatches]
    if group.rank == 0:
        print("documents", microbatches)
        print("tokens", tokens, "work", [round(value) for value in work])

    torch.manual_seed(0)  # Every rank makes the same model and data.
    inputs = [torch.randn(count, WIDTH) for count in tokens]
    targets = [torch.randn(count, WIDTH) for count in tokens]
    stage = penstock.PipelineStage(
        [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)][group.rank],
        group.rank,
        NUM_RANKS,
        torch.device("cpu"),
        group=group,
        dynamic_shapes=True,  # Microbatches have different shapes in every step.
    )
    pipeline = penstock.Pipeline(
        stage,
        "ZB-H1",
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=squared_error,
        by_work=True,
    )
    losses: list[Tensor] = []
    pipeline.step_microbatches(
        [(given,) for given in inputs] if group.rank == 0 else None,
        targets=targets if group.rank == 1 else None,
        weights=tokens,
        losses=losses,  # In the order of the microbatches as they were given.
        work=work,
    )
    return float(pipeline.share_loss(losses))


if __name__ == "__main__":
    for rank, loss in enumerate(penstock.local_ranks(NUM_RANKS, run_rank)):
        print(f"rank {rank}: loss {loss:.3f}")
