"""`penstock train` on processes: by its own launcher, by torch's, and as ranks that are forked.

Every wait has a limit, and nothing is left.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import launch_command
from limits import PROCESS_S
from penstock.comm import LocalGroup, local_ranks
from penstock.training.choices import Data
from penstock.training.documents import read_documents
from penstock.training.gpt_sizes import GptConfig
from penstock.training.settings import TrainConfig
from penstock.training.trainer import Trained, train

pytestmark = pytest.mark.dist

PENSTOCK = [sys.executable, "-m", "penstock"]
MODEL = GptConfig(num_layers=4, width=16, num_heads=2, context=8)
SIZES = ["--layers=4", "--width=16", "--heads=2", "--context=8", "--batch=8", "--lr=0.01"]


def command(*args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*PENSTOCK, *args], env=env, capture_output=True, text=True, timeout=PROCESS_S
    )
    return done


def losses_of(printed: str) -> list[float]:
    return [json.loads(line)["loss"] for line in printed.splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    return path


@pytest.fixture(scope="module")
def expected(text: Path) -> list[float]:
    """What the losses of a training are, on ranks that are threads and without an interruption."""

    def main(group: LocalGroup) -> Trained:
        config = TrainConfig(MODEL, batch=8, lr=0.01, steps=26)
        return train(config, Data(read_documents([str(text)])), group=group)

    return [done.loss for done in local_ranks(2, main)[0].steps]


def test_training_is_resumed_on_other_ranks_stages_and_schedules_with_the_same_losses(
    tmp_path: Path, text: Path, expected: list[float]
) -> None:
    folder = f"--checkpoint={tmp_path}"
    args = ["train", *SIZES, f"--text={text}", folder, "--steps=20", "--json"]
    assert expected[:20] == losses_of(launch_command(args, tmp_path))
    assert expected[19] < expected[0] - 1

    # One stage or four: the additions are the same. A full backward rounds its products otherwise.
    way = ["--ranks=1", "--schedule=1F1B"]
    resumed = ["train", folder, "--resume", "--steps=23", "--json", *way]
    second = launch_command(resumed, tmp_path, num_ranks=1)
    assert expected[20:23] == pytest.approx(losses_of(second), rel=1e-5)
    way = ["--ranks=2", "--schedule=Interleaved1F1B", f"--record={tmp_path / 'run.json'}"]
    third = launch_command(["train", folder, "--resume", "--steps=25", *way], tmp_path)
    [loss] = re.findall(r"step 25  loss (\S+)", third)
    assert expected[24] == pytest.approx(float(loss), abs=1e-4)
    assert f"checkpoint {tmp_path / 'step-000025'}" in third
    assert "penstock recording" == json.loads((tmp_path / "run.json").read_text())["format"]

    fourth = two_nodes(tmp_path, ["train", folder, "--resume", "--steps=26", "--json"])
    assert expected[25:] == pytest.approx(losses_of(fourth), rel=1e-5)
    assert (tmp_path / "step-000026" / "training.json").exists()


def two_nodes(folder: Path, args: list[str]) -> str:
    """What two launchers of torch print, each with one rank, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    try:
        for node in range(2):
            with (folder / f"node {node}").open("w") as file:
                nodes.append(
                    subprocess.Popen(
                        [*torchrun, *rendezvous, "-m", "penstock", *args],
                        env=env,
                        stdout=file,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        assert [0, 0] == [node.wait(PROCESS_S) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    return "".join((folder / f"node {node}").read_text() for node in range(2))


def test_failure_of_a_rank_is_told_in_one_line_by_the_rank_that_failed(text: Path) -> None:
    failed = command("train", *SIZES[:-1], f"--text={text}", "--schedule=1F1B", "--lr=1e30")
    assert 1 == failed.returncode
    [line] = failed.stderr.splitlines()
    assert line.startswith("error: the loss is nan in step")


@pytest.mark.parametrize("way", ["--replicas=2", "--shards=2"])
def test_pipelines_that_share_batches_train_as_one(
    tmp_path: Path, text: Path, expected: list[float], way: str
) -> None:
    folder = f"--checkpoint={tmp_path}"
    args = ["train", *SIZES, f"--text={text}", folder, "--microbatches=4", "--json", "--clip=100"]
    printed = launch_command([*args, "--steps=4", way], tmp_path, num_ranks=4)
    # A sum over two pipelines has another order, and AdamW enlarges what differs.
    assert expected[:4] == pytest.approx(losses_of(printed), rel=1e-4)
    again = ["train", folder, "--resume", "--steps=6", "--json", "--microbatches=8"]
    assert expected[4:6] == pytest.approx(losses_of(launch_command(again, tmp_path)), rel=1e-4)
