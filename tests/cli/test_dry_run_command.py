"""`dry-run`: a step of any rank of a model that is named as for train or plan."""

import json
from pathlib import Path

import pytest
from command_line import Ran, run

from penstock.schedules import get

MODULE = """
import torch
from torch import nn


def make():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        x = torch.zeros(8, 16)
        return model, x, {}, nn.functional.mse_loss, x


def make_without_loss():
    return make()[:2]
"""


def dry_run(options: str) -> Ran:
    return run("dry-run", *options.split())


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "dry_model.py"
    path.write_text(MODULE)
    return str(path)


def test_table_of_a_built_in_model() -> None:
    lines = dry_run("--model tiny --context 16 -p 2 -m 4 --schedule 1F1B --rank all").lines
    assert "rank  stages  parameters" in lines[0]
    assert ["0", "0"] == lines[1].split()[:2]
    assert ["0", "to", "rank", "1", "4"] == lines[4].split()[:5]
    assert "All 2 ranks match: 8 messages" in lines[-1]
    assert "A step of ranks 0, 1 was run" in lines[-1]


def test_function_and_schedule_in_a_file(module: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(get("ZB-H1")(num_ranks=4, num_microbatches=8).to_csv())
    found = json.loads(dry_run(f"{module}:make --schedule {path} --rank 3 --json").out)
    assert (4, 4, 8) == (found["num_ranks"], found["num_stages"], found["num_microbatches"])
    [rank] = found["ranks"]
    assert (3, [3], 24) == (rank["rank"], rank["stages"], rank["num_actions"])
    assert {"2": {"num_messages": 8, "num_bytes": 8 * 64}} == rank["sent"]
    weights = rank["parameter_bytes"] + rank["optimizer_bytes"]
    assert rank["peak_bytes"] > weights + rank["activation_bytes"]


def test_configuration_of_transformers_with_tied_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    described = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32}
    described |= {"n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(described))
    ran = dry_run(f"--model {tmp_path} -p 2 -m 2 --context 8 --schedule 1F1B --rank 0 --json")
    [rank] = json.loads(ran.out)["ranks"]
    messages, tied = 2 * 4 * 8 * 16, 1 + 4 * 32 * 16
    assert {"1": {"num_messages": 2, "num_bytes": messages + tied}} == rank["sent"]


def test_what_does_not_fit_fails() -> None:
    ran = dry_run("--model tiny --context 16 -p 2 -m 4 --memory 1MiB")
    assert "the training does not fit: rank 0: " in ran.error
    assert "but memory is 1 MiB" in ran.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{}:make --model tiny", "and --model were both given. Expected a function that makes"),
        ("{}:make --batch 8", "and --batch were both given"),
        ("{}:make_without_loss -p 2", "returned no loss_fn, but a dry run is of a training step"),
        ("--model tiny -p 2 --rank 2", "--rank is '2'. Expected a rank from 0 to 1, or all."),
        ("--model tiny -p 2 --rank 0 --rank x", "--rank is 'x'. Expected a rank from 0 to 1"),
        ("-p 65 -m 1 --rank all", "--rank is all, but there are 65 ranks. Expected at most 64"),
        ("--model tiny -p 2 -m 4 --batch 6", "--batch is 6"),
    ],
)
def test_options_that_cannot_be_used(options: str, message: str, module: str) -> None:
    assert message in dry_run(f"{options.format(module)}").error
