"""Steps whose forwards run twice, and the same steps without that: equal to the last bit."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from local_steps import mean_square, run_locally
from penstock import Pipeline, Schedule
from penstock.passes import add_recompute
from staged_models import Batch, named_grads


def recomputed(schedule: Schedule) -> dict[str, Schedule]:
    """All forwards run twice; or some of each stage, right before their backwards and earlier."""
    some = add_recompute(schedule, lambda stage, mb: (stage + mb) % 2 == 0)
    return {"all": add_recompute(schedule), "some": some, "early": moved_forward(some)}


def moved_forward(schedule: Schedule) -> Schedule:
    """Let each R change places with the action before it, where that is not its own F."""
    return schedule.with_orders(map(_moved_forward, schedule.orders))


def _moved_forward(order: Sequence[Any]) -> list[Any]:
    moved = list(order)
    for place in range(1, len(moved)):
        before, action = moved[place - 1 : place + 1]
        if type(action).__name__ == "Recompute" and str(action).replace("R", "F") not in str(
            before
        ):
            moved[place - 1 : place + 1] = [action, before]
    return moved


def train(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    batch: Batch,
    *,
    num_steps: int = 2,
    around: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    **options: Any,
) -> list[Any]:
    """What steps of a copy of the modules give, change and leave behind."""
    # Copied together, so that what they share stays shared.
    own = list(copy.deepcopy(nn.ModuleList(modules)))
    batch = copy.deepcopy(batch)

    def main(pipeline: Pipeline) -> list[Any]:
        found = []
        for _ in range(num_steps):
            losses: list[Tensor] = []

            def step(losses: list[Tensor] = losses) -> Any:
                return pipeline.step(
                    *batch.args, target=batch.target, losses=losses, **batch.kwargs
                )

            found.append((around(step), losses))
        return found

    torch.manual_seed(1)
    given = run_locally(own, schedule, main, **{"loss_fn": mean_square, **options})
    buffers = [dict(module.named_buffers()) for module in own]
    inputs = [leaf.grad for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [given, named_grads(dict(enumerate(own))), buffers, batch, inputs, torch.get_rng_state()]


def assert_same_bits(expected: Any, actual: Any) -> None:
    for (path, one), (_, other) in zip(_leaves(expected), _leaves(actual), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other), path
        else:
            assert one == other, path


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        yield pytree.keystr(path), leaf
