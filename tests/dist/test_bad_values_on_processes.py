"""Bad values on 2 and 4 processes: all ranks of all replicas skip the same steps."""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import penstock
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

SIZE, STEPS = 8, 4
BAD_STEPS = {1, 3}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).relu())


@cache
def make_mesh(other: str) -> DeviceMesh:
    """One mesh for all tests of a process, as its groups have threads."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", other))


def _train(
    world: dist.ProcessGroup,
    other: str,
    bad_values: str | None,
    kind: str,
) -> tuple[list[Any], list[Tensor]]:
    """Train with pp, or pp x another dimension; return what was found, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(4)))
    mesh = None
    options: dict[str, Any] = {}
    if other != "pp":
        mesh = make_mesh(other)
    if other == "tp":
        options["cut"] = penstock.cut_between_modules(model, 4)
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        options["tp_plan"] = {f"{n}.{name}": plan[name] for n in range(4) for name in plan}
    place = 0 if mesh is None or other == "tp" else mesh.get_local_rank(other)
    x, target = torch.randn(2, 16, SIZE)
    if mesh is not None and other != "tp":
        x, target = (t.chunk(2)[place] for t in (x, target))
    pipe = penstock.parallelize(
        model,
        x,
        loss_fn=nn.functional.mse_loss,
        num_microbatches=4,
        mesh=mesh,
        group=world if mesh is None else None,
        device="cpu",
        bad_values=bad_values,  # type: ignore[arg-type]
        **options,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found: list[Any] = []
    for step in range(STEPS):
        is_bad = step in BAD_STEPS
        if is_bad and bad_values is None:
            continue  # As if there had been no such batch.
        given = x.clone()
        if is_bad and (kind == "all" or place == 1):
            given[len(x) // 2, 0] = math.nan  # The third of four microbatches.
        optimizer.zero_grad()
        parts = (given, x) if kind == "accumulated" else (given,)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            pipe.step(part, target=target, finalize=is_last, grad_scale=1 / len(parts))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        found.append(None if pipe.bad_value is None else str(pipe.bad_value))
    weights = [_whole(parameter) for parameter in pipe.parameters()]
    pipe.close()
    return found, weights


def _whole(parameter: Any) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def _run(pool: WorkerPool, other: str, kind: str) -> None:
    num_ranks = 2 if other == "pp" else 4
    expected = pool.run(num_ranks, _train, other, None, kind)
    actual = pool.run(num_ranks, _train, other, "skip", kind)
    texts = {tuple(found) for found, _ in actual}
    assert len(texts) == 1  # All ranks have found the same.
    (found,) = texts
    assert [step in BAD_STEPS for step in range(STEPS)] == [text is not None for text in found]
    of_replica = {"pp": "", "tp": " of pipeline 0"}.get(
        other, f" of pipeline {0 if kind == 'all' else 1}"
    )
    for text in filter(None, found):
        assert f"nan appeared first in the forward of stage 0 (rank 0{of_replica})" in text
        assert text.endswith("microbatch 2, its inputs")
    for (_, plain), (_, skipping) in zip(expected, actual, strict=True):
        assert all(map(torch.equal, plain, skipping))


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("pp", "all"),
        ("dp", "all"),
        ("dp", "one"),
        ("fsdp", "one"),
        ("fsdp", "accumulated"),
        ("tp", "all"),
    ],
)
def test_all_ranks_skip_the_same_steps(pool: WorkerPool, other: str, kind: str) -> None:
    _run(pool, other, kind)
