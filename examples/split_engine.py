"""Shows: the two halves of a stage's backward, run when it suits, give the same gradients.

Four microbatches go through one stage. Their input halves run in order, since the stage
before waits for them; their weight halves run later, last microbatch first.
"""

import copy

import torch
from torch import nn

from penstock.backward import SplitEngine


def main() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    plain = copy.deepcopy(stage)
    inputs = [torch.randn(8, 16, requires_grad=True) for _ in range(4)]
    grads = [torch.randn(8, 16) for _ in range(4)]

    engine = SplitEngine(stage)
    forwards = [engine.forward(x) for x in inputs]
    pending = []
    for mb, (forward, grad) in enumerate(zip(forwards, grads, strict=True)):
        (dx,), weights = forward.backward_input(grad)
        pending.append(weights)
        print(f"I{mb}: gradient for the stage before: {tuple(dx.shape)}")
    print("weights have gradients:", any(p.grad is not None for p in stage.parameters()))

    for mb in reversed(range(4)):
        pending[mb].run()
        print(f"W{mb}: added to the weights")

    for x, grad in zip(inputs, grads, strict=True):
        plain(x.detach()).backward(grad)
    equal = all(
        torch.allclose(ours.grad, theirs.grad, atol=1e-5)
        for ours, theirs in zip(stage.parameters(), plain.parameters(), strict=True)
    )
    print("same as plain autograd:", equal)


if __name__ == "__main__":
    main()
