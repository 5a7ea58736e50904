"""A small model for `penstock.parallelize`, and its training on one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import penstock

WORDS, WIDTH, TOKENS, ROWS, NUM_MICROBATCHES = 13, 8, 5, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head, which share their weight if `is_tied`."""

    def __init__(self, *, is_tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).double()


def make_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    return tokens, tokens.roll(-1, 1)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def whole_step(model: nn.Module, tokens: Tensor, target: Tensor) -> float:
    """Run a step of the whole model, microbatch by microbatch; return its loss."""
    losses = []
    parts = zip(tokens.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
    for part, wanted in parts:
        loss = loss_of(model(part), wanted)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def spread(group: penstock.LocalGroup, model: nn.Module, **options: Any) -> penstock.ParallelModel:
    """Return the part of a rank; the model may be used by other ranks too."""
    tokens, _ = make_batch()
    given = {"loss_fn": loss_of, "num_microbatches": NUM_MICROBATCHES, "group": group, **options}
    return penstock.parallelize(copy.deepcopy(model), (tokens,), **given)


def on_ranks(
    num_ranks: int, run: Callable[[penstock.ParallelModel], Any], model: nn.Module, **options: Any
) -> list[Any]:
    """Run a function on each rank's part of a model; return what it returns."""

    def main(group: penstock.LocalGroup) -> Any:
        return run(spread(group, model, **options))

    return penstock.local_ranks(num_ranks, main)


def on_cut_ranks(
    num_ranks: int,
    run: Callable[[penstock.ParallelModel], Any],
    model: Decoder,
    *,
    schedule: str = "ZB-V",
    **options: Any,
) -> list[Any]:
    """Do the same without tracing, which takes most of the time."""
    make = penstock.schedules.get(schedule)
    num_stages = make(num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES).num_stages
    layers = ["embedding", "dropout", "blocks", "head"]

    def main(group: penstock.LocalGroup) -> Any:
        cut = penstock.cut_between_modules(copy.deepcopy(model), num_stages, layers=layers)
        return run(spread(group, model, schedule=schedule, cut=cut, **options))

    return penstock.local_ranks(num_ranks, main)


def assert_trained_alike(model: nn.Module, parts: list[dict[str, Tensor]]) -> None:
    """Compare the state dicts of all ranks with the whole model's."""
    expected = model.state_dict()
    assert expected.keys() == {name for part in parts for name in part}
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
