"""Gradients of pipelines that train one model, each in a launcher of its own, as with torchft.

Such pipelines have no process group in common: each of them can end while the others go on.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import GradientError
from penstock.parallel.parallel_model import ParallelModel
from penstock.stage.stage_checks import unwrapped
from penstock.torch_private import is_dtensor


class Reduction(Protocol):
    """A reduction that was started, such as torch's `Work`."""

    def wait(self) -> Any:
        """Return when the tensor has its new values."""


def average_grads(pipe: ParallelModel, allreduce: Callable[[Tensor], Reduction]) -> None:
    """Average this rank's gradients with those of the same rank in other pipelines.

    `allreduce` starts to average a tensor in place, as `torchft.Manager.allreduce` does. It is
    called once for each stage and dtype. Every rank must call this, after the last `step` before
    the optimizer's, and before gradients are clipped. All pipelines count alike.

        >>> import torch, penstock
        >>> from torch import nn
        >>> from penstock.parallel import average_grads
        >>> class Done:
        ...     def wait(self): ...
        >>> def add_zeros(flat):  # As if the gradients of another pipeline were zero.
        ...     flat /= 2
        ...     return Done()
        >>> def main(group):
        ...     x, loss_fn = torch.ones(2, 1), nn.functional.mse_loss
        ...     model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
        ...     nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
        ...     pipe = penstock.parallelize(model, x, loss_fn=loss_fn, group=group)
        ...     pipe.step(x, target=x)
        ...     before = model[1].bias.grad.item()
        ...     average_grads(pipe, add_zeros)
        ...     return before, model[1].bias.grad.item()
        >>> penstock.local_ranks(1, main)
        [(-2.0, -1.0)]
    """
    if pipe.optimizers:
        raise GradientError(
            f"rank {pipe.rank}: the optimizers step in the backward, before gradients can be "
            "averaged. Leave out optimizer_in_backward, and step an optimizer after average_grads."
        )
    together: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for stage, grad in _grads_of(pipe):
        together[stage, grad.dtype].append(grad)
    flats = [torch.cat([grad.reshape(-1) for grad in grads]) for grads in together.values()]
    started = [allreduce(flat) for flat in flats]
    for grads, flat, reduction in zip(together.values(), flats, started, strict=True):
        reduction.wait()
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def _grads_of(pipe: ParallelModel) -> Iterator[tuple[int, Tensor]]:
    """Yield the gradients of all parameters that are trained, with their stage.

    Of a DTensor, this is the part of this rank: its peers have the same part of theirs.
    """
    for i, stage in pipe.stages.items():
        for name, parameter in unwrapped(stage.submod).named_parameters():
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided:
                lack = "no gradient" if grad is None else "a sparse gradient"
                raise GradientError(
                    f"rank {pipe.rank}, stage {i}: parameter {name!r} has {lack}. Expected a "
                    "dense gradient of every parameter that is trained, so that all pipelines "
                    "average the same ones. Call average_grads after a step with finalize=True, "
                    "and freeze what the model does not use."
                )
            yield i, grad.to_local() if is_dtensor(grad) else grad  # type: ignore[attr-defined]
