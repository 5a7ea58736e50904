"""One call spreads a model over processes and their meshes; it trains as the whole model does."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import penstock
from launcher import FOR_RANKS, launch, launch_by_torchrun
from limits import PROCESS_S
from penstock.errors import CheckpointError, GradientError, StageError
from spread_models import NUM_MICROBATCHES, loss_of, make_batch, make_decoder, whole_step
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LAYERS = ["embedding", "dropout", "blocks", "head"]
TP_PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
MAX_NORM, RATE = 0.5, 0.01


@cache
def make_mesh(**sizes: int) -> DeviceMesh:
    """One mesh for all tests of a process, as its groups have threads."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Part(NamedTuple):
    """What a rank has after its steps."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def batch_of(step: int, replica: int, num_replicas: int) -> tuple[Tensor, Tensor]:
    """The part of a step's batch for one replica."""
    batches = [make_batch(10 * step + number) for number in range(num_replicas)]
    return batches[replica]


def spread(
    sizes: dict[str, int], *, is_traced: bool = True, **options: Any
) -> penstock.ParallelModel:
    model = make_decoder()
    tokens, _ = make_batch()
    cut = None
    if not is_traced:
        num_stages = 2 * sizes["pp"]
        cut = penstock.cut_between_modules(model, num_stages, layers=LAYERS)
    given = {"loss_fn": loss_of, "num_microbatches": NUM_MICROBATCHES, "cut": cut, **options}
    return penstock.parallelize(model, (tokens,), mesh=make_mesh(**sizes), **given)


def place_of(sizes: dict[str, int]) -> tuple[int, int]:
    """This process's number among the replicas, and their number."""
    mesh = make_mesh(**sizes)
    for name in ("dp", "fsdp"):
        if name in sizes:
            return mesh[name].get_local_rank(), mesh[name].size()
    return 0, 1


def train(
    _: dist.ProcessGroup, sizes: dict[str, int], folder: str, options: dict[str, Any]
) -> Part:
    """Two optimizer steps of two batches each; the second after a resumption."""
    replica, num_replicas = place_of(sizes)
    losses, norms = [], []
    for step in range(2):
        pipe = spread(sizes, **options)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
        if step:
            assert {"step": 1} == pipe.load(folder, optimizer)
        for part in range(2):
            tokens, target = batch_of(2 * step + part, replica, num_replicas)
            loss = pipe.step(tokens, target=target, finalize=part == 1, grad_scale=0.5)
            losses.append(loss.item())
        norms.append(pipe.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        tokens, target = batch_of(7, replica, num_replicas)
        losses.append(pipe.evaluate(tokens, target=target).item())
        saving = pipe.save(folder, optimizer, extra={"step": step + 1}, asynchronous=step == 0)
        saving.wait()
        assert (Path(folder) / "training.json").exists()  # On every rank, at once.
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in pipe.state_dict().items()
    }
    return Part(losses, norms, state)


def train_whole(num_replicas: int) -> Part:
    model = make_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            batches = [batch_of(2 * step + part, r, num_replicas) for r in range(num_replicas)]
            found = [whole_step(model, tokens, target) for tokens, target in batches]
            losses.append(sum(found) / num_replicas)
        for weight in model.parameters():
            weight.grad /= 2 * num_replicas
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        batches = [batch_of(7, replica, num_replicas) for replica in range(num_replicas)]
        with torch.no_grad():
            found = [loss_of(model(tokens), target).item() for tokens, target in batches]
        losses.append(sum(found) / num_replicas)
    return Part(losses, norms, model.state_dict())


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 4}, {}),
        ({"pp": 2, "dp": 2}, {}),
        ({"pp": 2, "fsdp": 2}, {}),
        ({"pp": 2, "fsdp": 2}, {"is_traced": False, "schedule": "Interleaved1F1B"}),
        ({"pp": 2, "tp": 2}, {"is_traced": False, "tp_plan": TP_PLAN}),
        ({"pp": 1, "fsdp": 4}, {}),
    ],
)
def test_training_in_a_mesh_equals_that_of_the_whole_model(
    sizes: dict[str, int], options: dict[str, Any], fresh_pool: WorkerPool, tmp_path: Path
) -> None:
    """With accumulation, clipping, evaluation, an asynchronous save and a resumption."""
    found = fresh_pool.run(4, train, sizes, str(tmp_path / "state"), options)
    expected = train_whole(sizes.get("dp", sizes.get("fsdp", 1)))
    for part in found:
        assert expected.losses == pytest.approx(part.losses, rel=1e-12)
        assert expected.norms == pytest.approx(part.norms, rel=1e-12)
        for name, value in part.state.items():
            torch.testing.assert_close(value, expected.state[name], rtol=0, atol=1e-11)
    assert expected.state.keys() == {name for part in found for name in part.state}


def count_reductions(_: dist.ProcessGroup, sizes: dict[str, int]) -> list[bool]:
    """Whether replicas have the same gradients after each step."""
    replica, num_replicas = place_of(sizes)
    mesh = make_mesh(**sizes)
    pipe = spread(sizes)
    found = []
    for step in range(2):
        tokens, target = batch_of(step, replica, num_replicas)
        pipe.step(tokens, target=target, finalize=step == 1)
        own = next(pipe.parameters()).grad
        others = [torch.empty_like(own) for _ in range(num_replicas)]
        dist.all_gather(others, own, group=mesh["dp"].get_group())
        found.append(all(torch.equal(own, other) for other in others))
        if step == 0:
            with pytest.raises(GradientError, match="the last step had finalize=False"):
                pipe.clip_grad_norm_(1.0)
    return found


def test_replicas_reduce_gradients_only_when_they_are_final(fresh_pool: WorkerPool) -> None:
    found = fresh_pool.run(4, count_reductions, {"pp": 2, "dp": 2})
    assert [[False, True]] * 4 == found


def drop_open(_: dist.ProcessGroup) -> list[float]:
    """The sums of gradients after a step, and after one whose open gradients were dropped."""
    pipe = spread({"pp": 2, "fsdp": 2})
    tokens, target = make_batch()
    sums = []
    for is_open in (False, True):
        pipe.zero_grad()
        if is_open:
            pipe.step(tokens, target=target, finalize=False)
            pipe.zero_grad()
        pipe.step(tokens, target=target)
        sums.append(sum(w.grad.to_local().abs().sum().item() for w in pipe.parameters()))
    state = {name: value + 1 for name, value in make_decoder().state_dict().items()}
    pipe.load_state_dict(state)  # A whole model's, of which each rank takes its shards.
    for name, value in pipe.state_dict().items():
        assert torch.equal(state[name], value.full_tensor())
    return sums


def test_open_gradients_of_shards_can_be_dropped(fresh_pool: WorkerPool) -> None:
    for alone, after in fresh_pool.run(4, drop_open):
        assert alone == after


def freeze(_: dist.ProcessGroup) -> float:
    """All replicas have the mean loss, also of stages that nothing is trained in."""
    sizes = {"pp": 2, "dp": 2}
    pipe = spread(sizes)
    tokens, target = batch_of(1, *place_of(sizes))
    next(pipe.parameters()).requires_grad_(False)
    with pytest.raises(StageError, match="requires_grad of a parameter has changed since its"):
        pipe.step(tokens, target=target)
    next(pipe.parameters()).requires_grad_(True)
    model = make_decoder()
    model.requires_grad_(False)
    frozen = penstock.parallelize(
        model, (tokens,), loss_fn=loss_of, num_microbatches=4, mesh=make_mesh(**sizes)
    )
    return frozen.evaluate(tokens, target=target).item()


def test_frozen_stages_of_replicas(fresh_pool: WorkerPool) -> None:
    model = make_decoder()
    with torch.no_grad():
        expected = sum(loss_of(model(x), y).item() for x, y in (batch_of(1, r, 2) for r in (0, 1)))
    assert [expected / 2] * 4 == pytest.approx(fresh_pool.run(4, freeze), rel=1e-12)


def save_in_a_part(group: dist.ProcessGroup, folder: str) -> tuple[bool, dict[str, Any]]:
    """A pipeline of some of the processes, which rank 0 of all is not in."""
    own = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return False, {}
    tokens, target = make_batch()
    pipe = penstock.parallelize(
        make_decoder(), (tokens,), loss_fn=loss_of, num_microbatches=4, group=own, timeout=60
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(tokens, target=target)
    optimizer.step()
    with pytest.raises(CheckpointError, match="but this model has only some of the processes"):
        pipe.save(folder, optimizer, asynchronous=True)
    pipe.save(folder, optimizer, extra={"step": 1})
    return pipe.is_main, pipe.load(folder, optimizer)


def test_pipeline_of_some_processes_is_saved(fresh_pool: WorkerPool, tmp_path: Path) -> None:
    found = fresh_pool.run(4, save_in_a_part, str(tmp_path / "state"))
    assert [(False, {}), (True, {"step": 1}), (False, {"step": 1}), (False, {})] == found


def is_freed(group: dist.ProcessGroup) -> tuple[int, int]:
    model = make_decoder(is_tied=False)
    tokens, _target = make_batch()
    pipe = penstock.parallelize(model, (tokens,), loss_fn=loss_of, num_microbatches=4, group=group)
    in_model = sum(not weight.is_meta for weight in model.parameters())
    return in_model, len(list(pipe.parameters()))


def test_parameters_of_other_ranks_leave_the_model(pool: WorkerPool) -> None:
    for in_model, held in pool.run(2, is_freed):
        assert held == in_model < len(list(make_decoder(is_tied=False).parameters()))


def refuse(_: dist.ProcessGroup) -> None:
    tokens, _target = make_batch()

    def with_mesh(mesh: Any, **options: Any) -> Any:
        return penstock.parallelize(
            make_decoder(), (tokens,), loss_fn=loss_of, num_microbatches=4, mesh=mesh, **options
        )

    with pytest.raises(StageError, match=r"mesh is a str\. Expected a DeviceMesh"):
        with_mesh("pp")
    with pytest.raises(StageError, match=r"'dp', and none is the pipeline's\. Expected one that"):
        with_mesh(make_mesh(dp=2))
    with pytest.raises(StageError, match=r"and 'cp' is unknown\. Expected 'pp' for the pipeline"):
        with_mesh(make_mesh(pp=2, cp=1))
    with pytest.raises(StageError, match="'dp_replicate' is the second one for replicas"):
        with_mesh(make_mesh(pp=2, dp=1, dp_replicate=1))
    with pytest.raises(StageError, match=r"tp_plan names 'blocks\.\*\.side', and no module"):
        with_mesh(make_mesh(pp=2, tp=1), tp_plan={"blocks.*.side": ColwiseParallel()})
    with pytest.raises(StageError, match=r"stage \d was traced, and a trace has the shapes"):
        with_mesh(make_mesh(pp=2, tp=1), tp_plan=TP_PLAN)


def test_meshes_that_cannot_be_used_are_refused(fresh_pool: WorkerPool) -> None:
    fresh_pool.run(2, refuse)


def test_script_of_the_readme_prints_the_same_on_1_2_and_4_processes(tmp_path: Path) -> None:
    """Alone it needs no launcher; torchrun makes the others."""
    readme = (ROOT / "README.md").read_text()
    [block] = re.findall(r"```python\n([^`]*parallelize[^`]*)```", readme)
    script = tmp_path / "script.py"
    script.write_text(block)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    alone = subprocess.run(
        [sys.executable, str(script)],
        env=environment | FOR_RANKS,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=True,
    )
    assert "" == alone.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", alone.stdout)]
    assert 3 == len(losses)
    assert losses[-1] < losses[0]
    assert alone.stdout == launch_by_torchrun(script, tmp_path)
    assert alone.stdout == launch(script, tmp_path, num_ranks=4)


AGAIN = """\
import torch
from torch import nn

import penstock

x, target = torch.ones(2, 4, 2)
for _ in range(10):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    cut = penstock.cut_between_modules(model, 4)
    options = {"loss_fn": nn.functional.mse_loss, "schedule": "1F1B", "cut": cut}
    with penstock.parallelize(model, x, num_microbatches=2, **options) as pipe:
        pipe.step(x, target=target)
assert not torch.distributed.is_initialized()
"""


def test_processes_can_join_again_and_again(tmp_path: Path) -> None:
    """A rank once connected to the address that another had in the group before."""
    script = tmp_path / "script.py"
    script.write_text(AGAIN)
    assert "" == launch(script, tmp_path, num_ranks=4)


def save_norms(_: dist.ProcessGroup, dim: str, folder: str) -> tuple[Any, Any]:
    """Return the buffers of a rank before and after it loads what all have saved."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    model = nn.Sequential(*layers)
    mesh = make_mesh(pp=1, **{dim: 4})
    x, target = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    cut = penstock.cut_between_modules(model, 1)
    options = {"loss_fn": nn.functional.mse_loss, "schedule": "1F1B", "cut": cut, "mesh": mesh}
    pipe = penstock.parallelize(model, x, num_microbatches=2, **options)
    pipe.step(x, target=target)
    before = {name: value.clone() for name, value in pipe.named_buffers()}
    pipe.save(folder)
    pipe.load(folder)
    return before, dict(pipe.named_buffers())


@pytest.mark.parametrize("dim", ["dp", "fsdp"])
def test_buffers_are_saved_by_one_replica(dim: str, fresh_pool: WorkerPool, tmp_path: Path) -> None:
    """A folder once had the mean of one replica beside the variance of another."""
    found = fresh_pool.run(4, save_norms, dim, str(tmp_path / "state"))
    first, second = found[0][0], found[1][0]
    assert not any(torch.equal(first[name], second[name]) for name in first if "mean" in name)
    for _, loaded in found:
        assert first.keys() == loaded.keys()
        assert all(torch.equal(first[name], loaded[name]) for name in first)
