"""The counted costs of a decoder, on tensors that have no values, against those of GPUs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from gpu_runs import Run, read_runs

WIDTH, NUM_HEADS = 3072, 24
EVEN = [run for run in read_runs() if run.kind == "base"]


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)))) * self.scale


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int = WIDTH, num_heads: int = NUM_HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(4096, width)
        self.layers = nn.ModuleList([Block(width, num_heads)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def test_attention_counts_on_the_meta_device_as_elsewhere() -> None:
    """There, torch's own would keep a score for each pair of tokens."""
    costs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, tokens = Decoder(100, 16, 2), torch.zeros(1, 64, dtype=torch.long)
        costs.append(
            penstock.count_layers(model, (tokens,), loss_fn=token_loss, target=tokens),
        )
    assert costs[0] == costs[1]


def test_chain_with_buffers_outside_the_state_dict_counts_on_the_meta_device() -> None:
    costs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, x = nn.Sequential(Block(16, 2), Block(16, 2)), torch.zeros(1, 64, 16)
        costs.append(penstock.count_layers(model, (x,), layers=["0", "1"]))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("run", EVEN, ids=lambda run: run.name)
def test_head_and_loss_count_as_measured_on_gpus(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with torch.device("meta"):
        model, tokens = Decoder(run.vocab).bfloat16(), torch.zeros(1, run.seq, dtype=torch.long)
    costs = penstock.count_layers(model, (tokens,), loss_fn=token_loss, target=tokens)
    times = {cost.name: cost.time for cost in costs}
    forward, backward = run.layers()
    measured = (forward[-1] + backward[-1]) / (forward[1] + backward[1])
    # Operations and bytes are not times: they say how long layers take only roughly.
    assert times["head"] / times["layers.0"] == pytest.approx(measured, rel=0.1)
