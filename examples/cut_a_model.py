"""Shows: a model with a forward of its own, cut into balanced stages and trained.

The model is traced, so nothing of it is rewritten: a value skips over stages, and embedding and
head are one parameter. Its stages have the model's own names, so that a state dict fits.
"""

import torch
from torch import Tensor, nn

import penstock


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, mask: Tensor) -> Tensor:
        first = x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask
        return self.head(x + first)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


schedule = penstock.schedules.get("ZB-V")(num_ranks=2, num_microbatches=4)
torch.manual_seed(0)
model = Net()
tokens, mask = torch.randint(32, (8, 5)), torch.ones(8, 5, 1)

# The example is one microbatch: 8 samples in 4 microbatches are 2 each.
balanced = penstock.Balanced(schedule.num_stages, placement=schedule.placement)
pieces = penstock.cut(model, (tokens[:2],), {"mask": mask[:2]}, split_policy=balanced)
print(pieces.info())


def run_rank(group: penstock.LocalGroup) -> list[float]:
    held = schedule.placement.stages_of(group.rank)
    stages = [pieces.build_stage(stage, "cpu", group) for stage in held]
    pipeline = penstock.Pipeline(stages, schedule, loss_fn=loss_fn)
    optimizer = torch.optim.SGD([w for s in stages for w in s.submod.parameters()], lr=0.5)
    history = []
    for _ in range(5):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if group.rank == 0:  # It holds the first and the last stage.
            pipeline.step(tokens, mask=mask, target=tokens.roll(-1, 1), losses=losses)
            history.append(torch.stack(losses).mean().item())
        else:
            pipeline.step()
        optimizer.step()
    return history


history, _ = penstock.local_ranks(2, run_rank)
print("losses:", " ".join(f"{loss:.2f}" for loss in history))

whole = Net()
state = {}
for stage in range(pieces.num_stages):
    state |= pieces.get_stage_module(stage).state_dict()
print("loads into the whole model:", whole.load_state_dict(state))
