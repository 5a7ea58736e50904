"""Odd tensors between processes: links send bytes, so what arrives must be what they meant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_ranks import make_pipeline
from torch import Tensor, nn

from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

NUM_STEPS = 3


def _numbers() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def _complex(x: Tensor) -> Tensor:
    return torch.complex(x, x * x)


# What the first stage makes of the numbers, and sends.
MESSAGES: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "no dims": lambda x: x.sum(),
    "zero size": lambda x: (x[:0], x, x[:, :0]),
    "only zero size": lambda x: x[:0],
    "bool and int": lambda x: (x > 0, x.to(torch.uint8), x.to(torch.int16), x),
    "narrow": lambda x: (x.bfloat16(), x.half(), x.to(torch.float8_e4m3fn).detach()),
    "complex": _complex,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::3],
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "twice": lambda x: (x, x),
    "values": lambda x: {"x": x, "name": "a", "none": None, "list": [1, x]},
    "large": lambda x: x.sum() + torch.zeros(1000, 2000, dtype=x.dtype),
    "conjugate": lambda x: _complex(x).conj(),
    "negative": lambda x: _complex(x).conj().imag,
}


class _First(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.scale * x)


class _Second(nn.Module):
    """Checks what came, and adds up what can be added."""

    def __init__(self, expected: tuple[Any, ...]) -> None:
        super().__init__()
        self.expected = expected

    def forward(self, *args: Any) -> Tensor:
        found, tree = torch.utils._pytree.tree_flatten(args)
        wanted, wanted_tree = torch.utils._pytree.tree_flatten(self.expected)
        assert wanted_tree == tree
        for one, other in zip(wanted, found, strict=True):
            if isinstance(one, Tensor):
                assert one.dtype == other.dtype
                plain = one.resolve_conj().resolve_neg()
                assert torch.equal(plain.to(torch.cdouble), other.to(torch.cdouble))
            else:
                assert one == other
        return _total(args)


def _total(value: Any) -> Tensor:
    """Weighs each place by another number, and takes real and imaginary parts apart."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in torch.utils._pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            weights = torch.linspace(1, 2, tensor.numel(), dtype=torch.float64).view(tensor.shape)
            parts = (tensor.real, 3 * tensor.imag) if tensor.is_complex() else (tensor.double(),)
            total = total + sum((weights * part).sum() for part in parts)
    return total


def _send(group: dist.ProcessGroup, name: str) -> None:
    make, rank = MESSAGES[name], dist.get_rank(group)
    first = _First(make)
    made = first(_numbers())
    arguments = made if type(made) is tuple else (made,)
    detached = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, arguments)
    pipeline = make_pipeline(
        rank,
        2,
        m=2,
        module_of=lambda stage: _First(make) if stage == 0 else _Second(detached),
        group=group,
        loss_fn=lambda output, target: output,
        scale_grads=False,
    )
    microbatches = [(_numbers(),)] * 2
    for _ in range(NUM_STEPS):
        pipeline.step_microbatches(microbatches if rank == 0 else None)
    if rank == 0:
        _total(arguments).backward()
        scale = next(pipeline.stages[0].submod.parameters())
        expected = 2 * NUM_STEPS * first.scale.grad
        torch.testing.assert_close(scale.grad, expected, rtol=1e-12, atol=1e-12)
    pipeline.close()


def _send_all(group: dist.ProcessGroup) -> None:
    for name in MESSAGES:
        try:
            _send(group, name)
        except Exception as error:
            error.add_note(f"message {name!r}")
            raise


@pytest.mark.parametrize("link", LINKS)
def test_odd_messages_and_their_gradients_arrive(link: str, pool: WorkerPool) -> None:
    pool.run(2, _send_all, link=link)
