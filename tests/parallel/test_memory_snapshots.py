"""Snapshots of a training in memory; tests/dist/test_going_on_from_memory.py kills such ranks."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CheckpointError
from penstock.snapshots import Part, Snapshot, kept_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")
X = torch.arange(32.0).view(8, 4) / 32


@pytest.fixture(autouse=True)
def _launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that stands for the one that starts ranks."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(kept_state.os, "getppid", lambda: process.pid)
    yield
    process.kill()
    process.communicate()


def make_pipe(group: penstock.LocalGroup | None = None) -> penstock.ParallelModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    return penstock.parallelize(
        model, (X,), loss_fn=nn.functional.mse_loss, num_microbatches=2, group=group
    )


def train(pipe: penstock.ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = pipe.step(X, target=X)
    optimizer.step()
    return loss.item()


def test_restored_training_goes_on_as_the_one_that_was_kept() -> None:
    with make_pipe() as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        first = pipe.snapshots(optimizer)
        assert None is first.restore()
        train(pipe, optimizer)
        optimizer.param_groups[0]["lr"] = 0.05
        first.take(1, extra={"epochs": {3: "c"}})
        expected = [train(pipe, optimizer), train(pipe, optimizer), random.random()]
        first._kept._finish()
        other = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        second = pipe.snapshots(other)
        assert (1, {"epochs": {3: "c"}}) == second.restore()
        assert 0.05 == other.param_groups[0]["lr"]
        assert expected == [train(pipe, other), train(pipe, other), random.random()]
        assert None is second.restore(after=1)
        second.close()


def test_snapshot_of_other_ranks_is_put_together_from_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_pipe() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        snapshots = pipe.snapshots(optimizer)
        train(pipe, optimizer)
        snapshots.take(1)
        snapshots._kept._finish()
        whole = snapshots._kept.read()
        assert whole is not None
        [part] = whole.parts
        names = sorted(part.tensors)
        halves = [
            replace(part, rank=rank, tensors={n: part.tensors[n].clone() for n in names[rank::2]})
            for rank in range(2)
        ]
        expected = {name: value.clone() for name, value in pipe.state_dict().items()}
        train(pipe, optimizer)
        monkeypatch.setattr(snapshots._kept, "read", lambda: Snapshot(1, 2, tuple(halves)))
        assert (1, {}) == snapshots.restore()
        for name, value in pipe.state_dict().items():
            assert torch.equal(expected[name], value)
        missing = Snapshot(1, 2, tuple(halves[:1]))
        monkeypatch.setattr(snapshots._kept, "read", lambda: missing)
        with pytest.raises(CheckpointError, match=r"the snapshots that this rank can have lack '"):
            snapshots.restore()
        damaged = Snapshot(1, 2, (Part(0, part.tensors, {}),))
        monkeypatch.setattr(snapshots._kept, "read", lambda: damaged)
        with pytest.raises(CheckpointError, match=r"snapshot of step 1 cannot be loaded: KeyErr"):
            snapshots.restore()
        snapshots.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1)),
            "has the shape (1, 4), and",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "has '2.bias', which the model does not have"),
    ],
)
def test_snapshot_of_another_model_is_refused(other: nn.Module, message: str) -> None:
    with make_pipe() as pipe:
        first = pipe.snapshots(torch.optim.SGD(pipe.parameters(), lr=0.1))
        first.take(1)
        first._kept._finish()
    target = torch.ones_like(other(X))
    loss_fn = nn.functional.mse_loss
    with penstock.parallelize(
        other, (X,), loss_fn=loss_fn, example_target=target, num_microbatches=2
    ) as pipe:
        second = pipe.snapshots(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            second.restore()


def test_step_is_a_number_from_1_on() -> None:
    with make_pipe() as pipe:
        snapshots = pipe.snapshots()
        for step in (0, -1, 2.5):
            with pytest.raises(CheckpointError, match=r"step is .* Expected the number of a step"):
                snapshots.take(step)  # type: ignore[arg-type]
        snapshots.close()


def test_threads_cannot_be_outlived() -> None:
    def run_rank(group: penstock.LocalGroup) -> None:
        with make_pipe(group) as pipe:
            pipe.snapshots()

    with pytest.raises(CheckpointError, match=r"the ranks are threads, which end together with"):
        penstock.local_ranks(1, run_rank)
