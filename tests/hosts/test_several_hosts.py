"""Trainings over several hosts, started by torchrun, are those of one host."""

import subprocess
from pathlib import Path

import pytest

from launcher import launch
from limits import PROCESS_S
from network_hosts import Hosts

pytestmark = pytest.mark.dist

SCRIPT = """
import time

import torch
import penstock

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
x, target = torch.randn(8, 8), torch.randn(8, 8)
loss_fn = torch.nn.functional.mse_loss
pipe = penstock.parallelize(model, example=(x,), loss_fn=loss_fn, num_microbatches=4)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = pipe.step(x, target=target)
    optimizer.step()
    if pipe.is_main:
        print(repr(float(loss)), flush=True)
time.sleep(2)  # The hub ends with its rank: let all others find it before.
"""


def _torchrun(hosts: Hosts, num_hosts: int, per_host: int, how: str, folder: Path) -> str:
    """Run the script by a launcher on each host; returns what they print."""
    running = []
    try:
        for host in range(num_hosts):
            run = hosts.torchrun(host, num_hosts=num_hosts, per_host=per_host, how=how)
            process = hosts.start(
                host,
                [*run, str(folder / "script.py")],
                env=hosts.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.append(process)
        said = [process.communicate(timeout=PROCESS_S) for process in running]
        errors = "\n".join(errors for _, errors in said)
        assert [0] * num_hosts == [process.returncode for process in running], errors
        assert "not watched" not in errors
        return "".join(printed for printed, _ in said)
    finally:
        for process in running:
            with process:
                process.kill()


@pytest.mark.parametrize(
    ("how", "num_hosts", "per_host", "rate"),
    [("static", 2, 2, ""), ("c10d", 2, 1, "2mbit")],
)
def test_losses_on_several_hosts_are_those_of_one(
    hosts: Hosts, tmp_path: Path, how: str, num_hosts: int, per_host: int, rate: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if rate:
        hosts.slow(1, rate)
    try:
        printed = _torchrun(hosts, num_hosts, per_host, how, tmp_path)
    finally:
        if rate:
            hosts.quicken(1)
    assert 3 == len(printed.split())
    expected = launch(tmp_path / "script.py", tmp_path, num_ranks=num_hosts * per_host)
    assert expected == printed
    assert [] == hosts.processes()
