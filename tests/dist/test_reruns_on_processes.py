"""Models cut between their layers train on processes and meshes as the whole model does."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import penstock
from layered_models import Doubled
from penstock.errors import StageError, TraceError
from spread_models import NUM_MICROBATCHES, WIDTH, WORDS, loss_of, make_batch
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

MESHES = {
    "pp": {"pp": 2},
    "dp": {"pp": 2, "dp": 2},
    "fsdp": {"pp": 2, "fsdp": 2},
}
SCHEDULES = ("1F1B", "ZB-V")
RATE = 0.1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        inner = self.norm(x) if memory is None else self.norm(x) * memory
        inner = self.drop(torch.tanh(self.up(inner)))
        return x + mask * Doubled.apply(self.down(inner))


class Translator(nn.Module):
    """An encoder, and a decoder whose layers all take its output; head and embedding are tied."""

    layerdrop = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Layer() for _ in range(3))
        self.decoder = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.drop = nn.Dropout(0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 1).unsqueeze(-1).double()
        memory = self.drop(self.embedding(tokens))
        for layer in self.encoder:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            memory = layer(memory, mask)
        x = self.drop(self.embedding(tokens.flip(1)))
        for layer in self.decoder:
            x = layer(x, mask, memory=memory)
        logits: Tensor = self.head(x)
        return logits


def make_model() -> Translator:
    torch.manual_seed(0)
    return Translator().double()


@cache
def make_mesh(**sizes: int) -> DeviceMesh:
    """One mesh for all tests of a process, as its groups have threads."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Part(NamedTuple):
    """What a rank has after its steps."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    """The gradients of each step."""
    state: dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def spread(ranks: dict[str, Any], schedule: str, **options: Any) -> penstock.ParallelModel:
    given = {"loss_fn": loss_of, "num_microbatches": NUM_MICROBATCHES, **ranks, **options}
    return penstock.parallelize(make_model(), make_batch()[:1], schedule=schedule, **given)


def train(group: dist.ProcessGroup, sizes: dict[str, int]) -> list[Part]:
    """Two steps with each schedule."""
    ranks: dict[str, Any] = {"group": group}
    options: dict[str, Any] = {}
    replica = 0
    if len(sizes) > 1:
        mesh = make_mesh(**sizes)
        ranks, replica = {"mesh": mesh}, mesh.get_local_rank(1)
    if "fsdp" in sizes:
        options = {"fsdp_options": {"reshard_after_forward": True}}
        policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        with pytest.raises(StageError, match=r"mp_policy with param_dtype=torch\.float32, but the"):
            spread(ranks, "1F1B", fsdp_options={"mp_policy": policy})
    return [train_part(spread(ranks, name, **options), replica) for name in SCHEDULES]


def train_part(pipe: penstock.ParallelModel, replica: int) -> Part:
    optimizer = torch.optim.SGD(pipe.parameters(), RATE)
    losses, grads = [], []
    for step in range(2):
        tokens, target = make_batch(10 * step + replica)
        losses.append(pipe.step(tokens, target=target).item())
        grads.append({name: whole(weight.grad) for name, weight in pipe.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    state = {name: whole(value) for name, value in pipe.state_dict().items()}
    pipe.close()
    return Part(losses, grads, state)


def train_whole(num_replicas: int) -> Part:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses, grads = [], []
    for step in range(2):
        total = 0.0
        for replica in range(num_replicas):
            tokens, target = make_batch(10 * step + replica)
            parts = zip(tokens.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
            for part, wanted in parts:
                loss = loss_of(model(part), wanted) / NUM_MICROBATCHES / num_replicas
                loss.backward()
                total += loss.item()
        losses.append(total)
        named = model.named_parameters(remove_duplicate=False)
        grads.append({name: weight.grad.clone() for name, weight in named})
        optimizer.step()
        optimizer.zero_grad()
    return Part(losses, grads, model.state_dict())


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_training_equals_that_of_the_whole_model(
    sizes: dict[str, int], fresh_pool: WorkerPool
) -> None:
    with pytest.raises(TraceError, match="autograd Function Doubled"):
        penstock.cut(make_model(), make_batch()[:1], split_policy=penstock.Balanced(2))
    num_replicas = sizes.get("dp", sizes.get("fsdp", 1))
    expected = train_whole(num_replicas)
    for parts in zip(*fresh_pool.run(2 * num_replicas, train, sizes), strict=True):
        for part in parts:
            assert expected.losses == pytest.approx(part.losses, rel=1e-12)
            for wanted, grads in zip(expected.grads, part.grads, strict=True):
                for name, grad in grads.items():
                    torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-12)
            for name, value in part.state.items():
                torch.testing.assert_close(value, expected.state[name], rtol=0, atol=1e-12)
        assert expected.state.keys() == {name for part in parts for name in part.state}
