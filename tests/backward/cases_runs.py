"""Cases: what changes how a forward or a backward is run, more than what it computes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from backward.case import Case, Raw, floats, given, raw, wrapped
from backward.cases_products import Block, mlp


class CountedSine(torch.autograd.Function):
    """sin(x), which counts its backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tally: Counter[str]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tally = tally
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.tally["backward"] += 1
        return grad * x.cos(), None


class CountedProduct(torch.autograd.Function):
    """x @ w and x.sum(1) with several inputs and outputs, which counts its backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tally: Counter[str]) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.tally = tally
        return x @ w, x.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        ctx.tally["backward"] += 1
        return grad @ w.t() + grad_sum[:, None], x.t() @ grad, None


def sine(stage: Raw, x: Tensor) -> Tensor:
    return CountedSine.apply(x, stage.tally)


FUNCTIONS = [
    Case(
        "Python Function on activations",
        raw(lambda s, x: sine(s, x @ s.a) @ s.b, a=(4, 3), b=(3, 2)),
        given((5, 4)),
    ),
    Case(
        "Python Function on a weight", raw(lambda s, x: x @ sine(s, s.w), w=(4, 3)), given((5, 4))
    ),
    Case(
        "Python Function on a weight used twice",
        raw(lambda s, x: (lambda w: (x @ w).tanh() @ w)(sine(s, s.w)), w=(4, 4)),
        given((5, 4)),
    ),
    Case(
        "Python Function on an activation and a weight",
        raw(lambda s, x: CountedProduct.apply(x.tanh(), s.w, s.tally), w=(4, 3)),
        given((5, 4)),
    ),
    Case(
        "Python Function with one output unused",
        raw(lambda s, x: CountedProduct.apply(x.tanh(), s.w, s.tally), w=(4, 3)),
        given((5, 4)),
        unused=frozenset({0}),
    ),
    Case(
        "Python Function on an input that needs no gradient",
        raw(lambda s, x: sine(s, x @ s.w), w=(4, 3)),
        lambda: (torch.randn(5, 4),),
    ),
    Case(
        "Python Function on a parameter that never meets the input",
        raw(lambda s, x: (x, sine(s, s.w)), w=(4, 3)),
        given((5, 4)),
    ),
]

bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)

AUTOCAST = [
    Case("autocast MLP", mlp, given((4, 6)), forward_context=bfloat16),
    Case(
        "autocast transformer block, 3-D linear last",
        lambda: nn.Sequential(Block(8), nn.Linear(8, 6)),
        given((2, 5, 8)),
        forward_context=bfloat16,
    ),
    Case(
        "autocast x @ w",
        raw(lambda s, x: x @ s.w, w=(4, 3)),
        given((5, 4)),
        forward_context=bfloat16,
    ),
    Case(
        "autocast weight used twice",
        raw(lambda s, x: (x @ s.w).tanh() @ s.w, w=(4, 4)),
        given((5, 4)),
        forward_context=bfloat16,
    ),
    Case(
        "autocast conv2d",
        lambda: nn.Conv2d(3, 4, 3),
        given((2, 3, 5, 5)),
        forward_context=bfloat16,
    ),
    Case(
        "autocast on an input that needs no gradient",
        mlp,
        lambda: (torch.randn(4, 6),),
        forward_context=bfloat16,
    ),
    Case(
        "autocast on a float64 stage",
        lambda: mlp().double(),
        lambda: (floats(4, 6, dtype=torch.float64),),
        forward_context=bfloat16,
    ),
    Case(
        "bfloat16 parameters",
        lambda: mlp().bfloat16(),
        lambda: (floats(4, 6, dtype=torch.bfloat16),),
    ),
]


class Counted(nn.Module):
    """Counts the forwards of the module inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.tally: Counter[str] = Counter()

    def forward(self, *args: Any) -> Any:
        self.tally["forward"] += 1
        return self.inside(*args)


class Checkpointed(nn.Module):
    """Recomputes the module inside in the backward."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = Counted(inside)

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inside, *args, use_reentrant=False)


def keep_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(block: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def checkpointed_blocks(num_blocks: int) -> nn.Module:
    return nn.Sequential(*(Checkpointed(Block(8)) for _ in range(num_blocks)), nn.Linear(8, 6))


def dropout_block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 6))


def sequence(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in makers))


CHECKPOINTS = [
    Case("every block checkpointed", lambda: checkpointed_blocks(3), given((2, 5, 8))),
    Case(
        "one block of two checkpointed",
        lambda: nn.Sequential(Block(8), Checkpointed(Block(8))),
        given((2, 5, 8)),
    ),
    Case("checkpointed MLP, 2-D", lambda: Checkpointed(mlp()), given((4, 6))),
    Case(
        "nested checkpoints",
        lambda: Checkpointed(nn.Sequential(Checkpointed(mlp()), Checkpointed(nn.Linear(5, 4)))),
        given((4, 6)),
    ),
    Case(
        "checkpoint with dropout",
        lambda: nn.Sequential(*(Checkpointed(dropout_block()) for _ in range(2))),
        given((4, 6)),
    ),
    Case(
        "checkpoint with a raw product",
        sequence(
            lambda: Checkpointed(raw(lambda s, x: (x @ s.w).tanh() @ s.w, w=(4, 4))()),
            lambda: nn.Linear(4, 3),
        ),
        given((5, 4)),
    ),
    Case(
        "checkpoint with a table and a norm",
        lambda: Checkpointed(
            nn.Sequential(
                raw(lambda s, x: x + s.table, table=(5, 4))(), nn.LayerNorm(4), nn.Linear(4, 3)
            )
        ),
        given((2, 5, 4)),
    ),
    Case(
        "checkpoint with a conv2d",
        lambda: Checkpointed(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))),
        given((2, 3, 5, 5)),
    ),
    Case(
        "checkpoint with in-place relu",
        lambda: Checkpointed(nn.Sequential(nn.Linear(4, 5), nn.ReLU(True), nn.Linear(5, 4))),
        given((2, 3, 4)),
    ),
    Case(
        "checkpoint of a module used twice",
        wrapped(lambda: Checkpointed(nn.Linear(4, 4)), lambda block, x: block(block(x).tanh())),
        given((5, 4)),
    ),
    Case(
        "checkpoint on an input that needs no gradient",
        lambda: nn.Sequential(Checkpointed(mlp()), nn.Linear(5, 3)),
        lambda: (torch.randn(4, 6),),
    ),
    Case(
        "checkpoint after an embedding",
        lambda: nn.Sequential(nn.Embedding(7, 8), Checkpointed(Block(8))),
        lambda: (torch.randint(7, (2, 5)),),
    ),
    Case(
        "checkpoint with two outputs of which one is unused",
        lambda: Checkpointed(
            wrapped(lambda: [nn.Linear(4, 5), nn.Linear(4, 3)], lambda a, b, x: (a(x), b(x)))()
        ),
        given((5, 4)),
        unused=frozenset({1}),
    ),
    Case(
        "checkpoint with a Python Function",
        lambda: Checkpointed(raw(lambda s, x: sine(s, x @ s.w), w=(4, 4))()),
        given((5, 4)),
    ),
    Case(
        "checkpoint with frozen weights",
        lambda: Checkpointed(nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 4))),
        given((5, 4)),
    ),
    Case(
        "checkpoint with batch norm",
        lambda: Checkpointed(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))),
        given((5, 4)),
    ),
    Case(
        "checkpoint under autocast",
        lambda: checkpointed_blocks(2),
        given((2, 5, 8)),
        forward_context=bfloat16,
    ),
    Case(
        "selective checkpoint that keeps products",
        wrapped(lambda: Counted(Block(8)), selectively),
        given((2, 5, 8)),
    ),
    Case(
        "selective checkpoint that keeps products, 2-D MLP",
        wrapped(lambda: Counted(mlp()), selectively),
        given((4, 6)),
    ),
    # Here the weight half itself runs the checkpoint, and finds more terms on the way.
    Case(
        "checkpointed layer that never meets the input",
        wrapped(
            lambda: [Checkpointed(mlp()), nn.Embedding(4, 6)],
            lambda block, table, x: x @ block(table.weight),
        ),
        given((3, 4)),
    ),
    Case(
        "output of a checkpointed layer that never meets the input",
        wrapped(
            lambda: [nn.Linear(4, 3), Checkpointed(mlp()), nn.Embedding(4, 6)],
            lambda layer, block, table, x: (layer(x), block(table.weight)),
        ),
        given((3, 4)),
    ),
    Case("checkpointed 1-D input", lambda: Checkpointed(mlp()), given((6,))),
]


@contextmanager
def unpacked_once() -> Iterator[None]:
    """Saved tensors that can be fetched once only, as from a store that frees what it gives."""
    store: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        key = len(store)
        store[key] = tensor.detach().clone()
        return key

    def unpack(key: int) -> Tensor:
        tensor, store[key] = store[key], None
        assert tensor is not None, "a saved tensor was unpacked twice"
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


def halved() -> saved_tensors_hooks:
    """Saved tensors that come back changed, so that going round the hooks is noticed."""
    return saved_tensors_hooks(lambda tensor: tensor.detach() * 2, lambda tensor: tensor / 4)


HOOKS = [
    Case("save_on_cpu MLP", mlp, given((4, 6)), forward_context=save_on_cpu),
    Case(
        "save_on_cpu block",
        lambda: nn.Sequential(Block(8), nn.Linear(8, 6)),
        given((2, 5, 8)),
        forward_context=save_on_cpu,
    ),
    Case(
        "save_on_cpu x @ w",
        raw(lambda s, x: (x @ s.w).tanh() @ s.w, w=(4, 4)),
        given((5, 4)),
        forward_context=save_on_cpu,
    ),
    Case(
        "save_on_cpu conv2d",
        lambda: nn.Conv2d(3, 4, 3),
        given((2, 3, 5, 5)),
        forward_context=save_on_cpu,
    ),
    Case(
        "save_on_cpu on an input that needs no gradient",
        mlp,
        lambda: (torch.randn(4, 6),),
        forward_context=save_on_cpu,
    ),
    Case(
        "saved tensors that can be unpacked once, MLP",
        mlp,
        given((4, 6)),
        forward_context=unpacked_once,
    ),
    Case(
        "saved tensors that can be unpacked once, 3-D block",
        lambda: Block(8),
        given((2, 5, 8)),
        forward_context=unpacked_once,
    ),
    Case(
        "saved tensors that can be unpacked once, shared weight",
        raw(lambda s, x: (x @ s.w).tanh() @ s.w, w=(4, 4)),
        given((5, 4)),
        forward_context=unpacked_once,
    ),
    Case(
        "saved tensors that come back changed, raw product",
        raw(lambda s, x: x @ s.w, w=(4, 3)),
        given((5, 4)),
        forward_context=halved,
    ),
    Case(
        "saved tensors that come back changed, linear",
        lambda: nn.Linear(4, 3),
        given((5, 4)),
        forward_context=halved,
    ),
    Case(
        "saved tensors that come back changed, conv2d",
        lambda: nn.Conv2d(3, 4, 3),
        given((2, 3, 5, 5)),
        forward_context=halved,
    ),
]

OTHERS = [
    Case("dropout", dropout_block, given((4, 6))),
    Case(
        "dropout on 3-D input",
        lambda: nn.Sequential(dropout_block(), nn.Dropout(0.3)),
        given((2, 4, 6)),
    ),
    Case(
        "complex parameters",
        lambda: nn.Sequential(
            nn.Linear(4, 5, dtype=torch.complex64), nn.Linear(5, 3, dtype=torch.complex64)
        ),
        lambda: (floats(3, 4, dtype=torch.complex64),),
    ),
    Case(
        "complex weight on a real input",
        lambda: Raw(
            lambda s, x: (x.to(torch.complex64) @ s.w).abs(),
            w=torch.randn(4, 3, dtype=torch.complex64),
        ),
        given((5, 4)),
    ),
    Case(
        "complex conv1d",
        lambda: nn.Conv1d(2, 3, 2, dtype=torch.complex64),
        lambda: (floats(2, 2, 5, dtype=torch.complex64),),
    ),
]

CASES = FUNCTIONS + AUTOCAST + CHECKPOINTS + HOOKS + OTHERS
