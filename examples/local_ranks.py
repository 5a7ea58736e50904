"""Shows: four ranks in one process, with no launcher: for notebooks, tests and debugging.

The gradients of a zero-bubble schedule are compared with those of the whole model.
"""

import copy

import torch
from torch import nn

import penstock

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def main() -> None:
    torch.manual_seed(0)
    schedule = penstock.schedules.get("ZB-V")(
        num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES
    )
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(schedule.num_stages))
    ).double()
    whole = copy.deepcopy(model)
    x, target = torch.randn(2, 16, 32, dtype=torch.float64)

    def run_rank(group: penstock.LocalGroup) -> list[float]:
        held = schedule.placement.stages_of(group.rank)
        stages = [
            penstock.PipelineStage(model[i], i, schedule.num_stages, "cpu", group=group)
            for i in held
        ]
        pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        pipeline.step(x, target=target, losses=losses)
        print(f"rank {group.rank} holds stages {held[0]} and {held[1]}")
        return [loss.item() for loss in losses]

    losses, *_ = penstock.local_ranks(NUM_RANKS, run_rank)  # Rank 0 has the last stage.
    print(f"mean of {len(losses)} losses: {sum(losses) / len(losses):.4f}")

    nn.functional.mse_loss(whole(x), target).backward()
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
    print("every gradient is that of the whole model")


if __name__ == "__main__":
    main()
