"""The examples that need several processes."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher import launch

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).parents[1] / "golden"


def test_script_for_torch_runs_on_penstock_by_changing_one_import(tmp_path: Path) -> None:
    ours = (EXAMPLES / "drop_in.py").read_text()
    torchs, changes = re.subn(
        "^from penstock import", "from torch.distributed.pipelining import", ours, flags=re.M
    )
    assert 1 == changes
    assert "penstock" not in re.sub(r'""".*?"""', "", torchs, flags=re.S).lower()
    (tmp_path / "torchs.py").write_text(torchs)
    printed = launch(EXAMPLES / "drop_in.py", tmp_path)
    assert (GOLDEN / "example_drop_in.txt").read_text() == printed
    assert launch(tmp_path / "torchs.py", tmp_path) == printed


def test_training_on_two_ranks_lowers_the_loss(tmp_path: Path) -> None:
    printed = launch(EXAMPLES / "train.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    # 128 characters: guessing costs log(128) = 4.85, and the most common ones are soon learned.
    assert 4.6 < losses[0] < 5.2
    assert losses[-1] < 2.7


def test_hugging_face_model_learns_on_two_ranks(tmp_path: Path) -> None:
    printed = launch(EXAMPLES / "hugging_face.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    # 256 tokens: guessing costs log(256) = 5.55.
    assert 5.3 < losses[0] < 5.8
    assert losses[-1] < losses[0] - 0.5


def test_recorded_run_is_read_and_drawn(tmp_path: Path) -> None:
    first, measured, simulated, *waits = launch(EXAMPLES / "recorded_run.py", tmp_path).splitlines()
    assert "10 steps were recorded" == first
    assert re.fullmatch(r"measured: \S+ ms, a bubble of \S+%", measured)
    assert re.fullmatch(r"simulated: \S+ ms, a bubble of \S+%", simulated)
    assert 3 == sum(bool(re.fullmatch(r"rank \d waited \S+ ms before \d\w\d", w)) for w in waits)
    assert {"run.html", "run.json"} == {
        path.name for path in (tmp_path / "penstock-examples").iterdir()
    }


@pytest.mark.parametrize(("name", "num_blocks"), [("sharded_stages", 8), ("tensor_parallel", 4)])
def test_stages_in_a_mesh_learn_as_the_whole_model(
    name: str, num_blocks: int, tmp_path: Path
) -> None:
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.manual_seed(0)
    model = nn.Sequential(*(example["Block"]() for _ in range(num_blocks)))
    sizes = [example[size] for size in ("BATCH", "TOKENS", "WIDTH") if size in example]
    x, target = torch.randn(2, *sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for _ in range(example["NUM_STEPS"]):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    printed = launch(EXAMPLES / f"{name}.py", tmp_path, num_ranks=4)
    # Four digits are printed.
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert expected == pytest.approx(losses, abs=1e-4)
