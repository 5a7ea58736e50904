"""Folders of models, read and written by processes that hold stages, shards or replicas of them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import penstock
from penstock.errors import PretrainedError
from penstock.parallel.safetensors_writing import SafetensorsWriter
from pretrained_folders import grads_of_whole, make_llama, make_tokens, next_token_loss, save
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


@cache
def make_mesh(kind: str) -> DeviceMesh:
    """One mesh for all tests of a process, as its groups have threads."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))


def load(world: dist.ProcessGroup, folder: Path, kind: str) -> penstock.ParallelModel:
    spread: Any = {"mesh": make_mesh(kind)} if kind else {"group": world}
    return penstock.parallelize(
        penstock.load_pretrained(folder),
        make_tokens(),
        loss_fn=next_token_loss,
        num_microbatches=4,
        schedule="1F1B",
        **spread,
    )


def train_and_save(
    world: dist.ProcessGroup, folder: Path, target: Path, kind: str
) -> dict[str, Tensor]:
    """The values of this rank's stages after a step, each of them whole."""
    pipe = load(world, folder, kind)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    tokens = make_tokens()
    pipe.step(tokens, target=tokens)
    optimizer.step()
    pipe.save_pretrained(target)
    state = {name: whole(value) for name, value in pipe.state_dict().items()}
    pipe.pipeline.close()
    return state


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("kind", ["", "fsdp", "dp"])
def test_what_processes_save_is_what_they_hold(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    folder, target = tmp_path / "first", tmp_path / "second"
    save(make_llama(is_tied=True).double(), folder)
    states = pool.run(4 if kind else 2, train_and_save, folder, target, kind)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    actual = model.state_dict()
    assert actual.keys() == {name for state in states for name in state}
    for state in states:
        for name, value in state.items():
            assert torch.equal(value, actual[name]), name
    reference = make_llama(is_tied=True).double()
    grads = grads_of_whole(reference)
    for name, weight in reference.named_parameters():
        expected = weight.detach() - 0.1 * grads[name]
        torch.testing.assert_close(actual[name], expected, rtol=1e-10, atol=1e-12)
    files = sorted(target.glob("*.safetensors"))
    assert 2 == len(files)  # One for each stage, whoever holds copies or shards of it.
    names = [name for file in files for name in load_file(file)]
    assert len(names) == len(set(names))


def save_where_one_has_no_room(world: dist.ProcessGroup, folder: Path, target: Path) -> str:
    pipe = load(world, folder, "fsdp")
    write = SafetensorsWriter.write

    def fail(writer: SafetensorsWriter, tensors: Any) -> None:
        if dist.get_rank() == 2:  # The first shard of the second stage, which writes it.
            raise OSError(28, "No space left on device")
        write(writer, tensors)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SafetensorsWriter, "write", fail)
            pipe.save_pretrained(target)
    except PretrainedError as error:
        return str(error)
    finally:
        pipe.pipeline.close()
    return ""


def test_disk_that_is_full_for_one_process_is_an_error_on_all(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """The other shards of its stage must not wait for it."""
    folder = tmp_path / "model"
    save(make_llama(), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    reports = pool.run(4, save_where_one_has_no_room, folder, folder)
    assert 4 == sum("cannot be saved to" in report for report in reports)
    assert 4 == sum("OSError: [Errno 28] No space left" in report for report in reports)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [folder] == list(tmp_path.iterdir())
