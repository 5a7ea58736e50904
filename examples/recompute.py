"""Shows: memory for time. Forwards that are recomputed hold less, and train the same.

A recomputation runs the whole stage again, or the blocks that it names in `recomputed`.

Run it with: python examples/recompute.py
"""

import torch
from torch import Tensor, nn

import penstock
from penstock.passes import add_recompute

NUM_RANKS, NUM_MICROBATCHES, WIDTH = 4, 8, 64


class Block(nn.Module):
    """A block that keeps much more for its backward than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y


def run_rank(
    group: penstock.LocalGroup, schedule: penstock.Schedule, recomputed: list[str] | None
) -> tuple[penstock.Recording, Tensor]:
    """Record steps of one stage per rank; return also the gradient of the stage's first weight."""
    torch.manual_seed(group.rank)
    module = nn.Sequential(Block(), Block())
    stage = penstock.PipelineStage(
        module, group.rank, NUM_RANKS, "cpu", group=group, recomputed=recomputed
    )
    pipeline = penstock.Pipeline(stage, schedule, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(0)
    x, target = torch.randn(2, 16 * NUM_MICROBATCHES, WIDTH)
    pipeline.step(x, target=target)
    with penstock.record(memory=True) as run:
        for _ in range(3):
            pipeline.step(x, target=target, return_outputs=False)
    grad = module[0].layers[0].weight.grad
    assert grad is not None
    return run.recording, grad


def main() -> None:
    kept = penstock.schedules.get("1F1B")(num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    # The first ranks hold most microbatches; the last one would run B right after F anyway.
    some = add_recompute(kept, only=lambda stage, mb: stage < NUM_RANKS - 1)
    found = []
    for name, schedule, recomputed, forwards in (
        ("none", kept, None, 1.0),
        ("half", some, ["1"], 1.5),  # The second of the two blocks.
        ("all", some, None, 2.0),
    ):
        ranks = penstock.local_ranks(NUM_RANKS, run_rank, schedule, recomputed)
        found.append([grad for _, grad in ranks])
        peaks = ranks[0][0].typical().measured_peaks
        held = (f"rank {rank}: {peak / 1e3:3.0f} kB" for rank, peak in enumerate(peaks))
        print(f"recomputed: {name:4} ({forwards} forwards)", *held)
    for expected, *others in zip(*found, strict=True):
        assert all(torch.equal(expected, other) for other in others)
    print("The gradients are the same to the last bit.")


if __name__ == "__main__":
    main()
