"""Write an order pass by pass, counting the microbatches."""

from collections import Counter, deque

from penstock.ir import Action, Backward, BackwardInput, BackwardWeight, Forward, Overlap


class Writer:
    """An order in the making: each call adds the next microbatch of its stage."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.num_forwards: Counter[int] = Counter()
        self.num_backwards: Counter[int] = Counter()
        self._waiting: deque[BackwardWeight] = deque()

    def forward(self, stage: int) -> None:
        self.order.append(self._next_forward(stage))

    def backward(self, stage: int) -> None:
        self.order.append(Backward(stage, self._next_backward(stage)))

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        forward = self._next_forward(forward_stage)
        backward = Backward(backward_stage, self._next_backward(backward_stage))
        self.order.append(Overlap(forward, backward))

    def backward_input(self, stage: int) -> None:
        """Add an I; its W waits for `backward_weight`."""
        mb = self._next_backward(stage)
        self.order.append(BackwardInput(stage, mb))
        self._waiting.append(BackwardWeight(stage, mb))

    def backward_weight(self) -> None:
        """Add the W that has waited longest, of any stage; add nothing if none waits."""
        if self._waiting:
            self.order.append(self._waiting.popleft())

    def backward_weights(self) -> None:
        """Add every W that waits."""
        self.order.extend(self._waiting)
        self._waiting.clear()

    def _next_forward(self, stage: int) -> Forward:
        self.num_forwards[stage] += 1
        return Forward(stage, self.num_forwards[stage] - 1)

    def _next_backward(self, stage: int) -> int:
        self.num_backwards[stage] += 1
        return self.num_backwards[stage] - 1
