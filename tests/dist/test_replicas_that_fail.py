"""Two pipelines that are replicas by torchft: one is killed, the other goes on."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher import FOR_RANKS
from limits import PROCESS_S

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        find_spec("torchft") is None, reason="torchft is missing: pip install '.[replicas]'"
    ),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "replicas_torchft.py"

# The example, in which a rank of replica 1 kills itself in a forward, when the test asks for it.
DYING = f"""
import os, pathlib, runpy, sys
import penstock, torch

torch.set_default_dtype(torch.float64)
parallelize = penstock.parallelize
armed = pathlib.Path("armed_" + os.environ["RANK"])

def with_fault(*args, **options):
    pipe = parallelize(*args, **options)
    def die(module, args):
        if armed.exists():
            armed.unlink()
            os.kill(os.getpid(), {int(signal.SIGKILL)})
    if os.environ["REPLICA"] == "1":
        pipe.stages[min(pipe.stages)].submod.register_forward_pre_hook(die)
    return pipe

penstock.parallelize = with_fault
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def start(replica: int, lighthouse: str, folder: Path) -> "subprocess.Popen[bytes]":
    environment = {
        "REPLICA": str(replica),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (
        (folder / f"printed_{replica}").open("w") as printed,
        (folder / f"errors_{replica}").open("w") as errors,
    ):
        return subprocess.Popen(
            [sys.executable, *command, "--max-restarts=2", "dying.py", "100000"],
            env=os.environ | FOR_RANKS | environment,
            stdout=printed,
            stderr=errors,
            cwd=folder,
        )


def lines_of(replica: int, folder: Path) -> list[tuple[str, str, str]]:
    """The step, the loss and the number of pipelines, of each step that was done."""
    printed = (folder / f"printed_{replica}").read_text()
    return re.findall(r"^step (\d+): loss (\S+), (\d) alive\n", printed, flags=re.M)


def wait_until(is_so: Callable[[], bool], folder: Path) -> None:
    until_s = time.monotonic() + PROCESS_S
    while not is_so():
        errors = [(folder / f"errors_{replica}").read_text() for replica in range(2)]
        assert time.monotonic() < until_s, errors
        time.sleep(0.05)


def expected_losses(num_steps: int) -> list[float]:
    """The losses of the whole model, on whole batches."""
    example = runpy.run_path(str(EXAMPLE))
    model = example["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        x, target = example["batch_of"](step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_killed_pipeline_does_not_stop_the_other_and_comes_back(
    lighthouse: str, tmp_path: Path, double_by_default: None
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    launchers = [start(replica, lighthouse, tmp_path) for replica in range(2)]

    def has_seen(pattern: str) -> bool:
        alive = "".join(alive for _, _, alive in lines_of(0, tmp_path))
        return re.search(pattern, alive) is not None

    try:
        wait_until(lambda: has_seen("2{3}"), tmp_path)
        (tmp_path / "armed_0").touch()  # torchft's server for this pipeline is on rank 0.
        wait_until(lambda: has_seen("21+2{3}"), tmp_path)
        (tmp_path / "armed_1").touch()
        wait_until(lambda: has_seen("21+2+1+2{3}"), tmp_path)
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait(PROCESS_S)
    healthy, failed = lines_of(0, tmp_path), lines_of(1, tmp_path)
    # No step is left out or done twice, and each is on the whole batch.
    steps = [int(step) for step, _, _ in healthy]
    assert list(range(steps[0], steps[-1] + 1)) == steps
    # Five digits are printed.
    losses = [float(loss) for _, loss, _ in healthy]
    expected = expected_losses(steps[-1] + 1)[steps[0] :]
    assert expected == pytest.approx(losses, abs=1e-5)
    # What the pipelines did together, both print: also after one came back with the other's state.
    together = [line for line in healthy if line[2] == "2"]
    assert together[:-1] == [line for line in failed if line in together[:-1]]
