"""The scripts of the guide that need several processes."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuzzing import IS_LONG
from launcher import launch

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


@pytest.mark.parametrize("num_ranks", [2, 4] if IS_LONG else [4])
def test_first_script_equals_the_whole_model_and_learns(num_ranks: int, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    [block] = re.findall(r"```python\n([^`]*init_process_group[^`]*)```", page)
    (tmp_path / "first.py").write_text(block)
    printed = launch(tmp_path / "first.py", tmp_path, num_ranks=num_ranks)
    assert num_ranks == printed.count("every gradient is that of the whole model")
    losses = losses_in(printed)
    assert 4 == len(losses)
    assert losses[-1] < losses[0]
    assert (tmp_path / "run.json").exists()


def test_two_pipelines_train_as_the_whole_model(tmp_path: Path) -> None:
    script = ROOT / "examples" / "data_parallel.py"
    names = runpy.run_path(str(script))
    model: nn.Module = names["make_model"]()
    x, target = torch.randn(2, names["BATCH"], names["WIDTH"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(names["NUM_STEPS"] + 1):  # The last is that of the checkpoint.
        loss = nn.functional.mse_loss(model(x), target)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert expected == pytest.approx(losses_in(launch(script, tmp_path, num_ranks=4)), abs=1e-4)


def train_whole(names: dict[str, Any], num_steps: int) -> list[tuple[float, float]]:
    """The losses and norms of the example's model on one device."""
    model: nn.Module = names["make_model"]()
    words = torch.arange(names["WORDS"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=names["RATE"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, names["warm_up"])
    trained = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words), words.roll(1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), names["MAX_NORM"])
        optimizer.step()
        scheduler.step()
        trained.append((loss.item(), norm.item()))
    return trained


def test_other_ranks_go_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The learning rate warms up in the first run, and gradients are clipped in both."""
    script = ROOT / "examples" / "checkpoint.py"
    names = runpy.run_path(str(script))
    trained = train_whole(names, 2 * names["NUM_STEPS"])
    found = [
        pair
        for num_ranks in (2, 4)
        for pair in re.findall(
            r"loss (\S+), norm (\S+)", launch(script, tmp_path, num_ranks=num_ranks)
        )
    ]
    # Four digits are printed, of numbers of 32 bits after twelve steps.
    assert trained == [pytest.approx(tuple(map(float, pair)), abs=2e-4) for pair in found]
    assert any(norm > names["MAX_NORM"] for _, norm in trained)
    assert any(norm < names["MAX_NORM"] for _, norm in trained)
