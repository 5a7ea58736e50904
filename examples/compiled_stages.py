"""Shows: compiled blocks in a zero-bubble schedule, whose backward is split all the same.

Equal blocks share what the compiler makes of the first. Two ranks run in one process.
"""

import copy

import torch
from torch import Tensor, nn

import penstock

NUM_RANKS, NUM_MICROBATCHES = 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def main() -> None:
    torch.manual_seed(0)
    schedule = penstock.schedules.get("ZB-V")(
        num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES
    )
    blocks = [Block() for _ in range(schedule.num_stages)]
    whole = copy.deepcopy(nn.Sequential(*blocks))
    compiled = [penstock.compile(block, dynamic=False) for block in blocks]  # As torch.compile.
    x, target = torch.randn(2, 16, 32)

    def run_rank(group: penstock.LocalGroup) -> str:
        stages = [
            penstock.PipelineStage(compiled[i], i, schedule.num_stages, "cpu", group=group)
            for i in schedule.placement.stages_of(group.rank)
        ]
        pipeline = penstock.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
        pipeline.step(x, target=target)
        return f"rank {group.rank} has trained {len(stages)} compiled stages"

    print(*penstock.local_ranks(NUM_RANKS, run_rank), sep="\n")

    nn.functional.mse_loss(whole(x), target).backward()
    for block, expected in zip(blocks, whole, strict=True):
        for own, theirs in zip(block.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(own.grad, theirs.grad)
    print("every gradient is that of the whole model")


if __name__ == "__main__":
    main()
