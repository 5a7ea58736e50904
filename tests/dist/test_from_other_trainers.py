"""Programs for other trainers run on a pipeline, and learn the same, with five lines changed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from launcher import launch

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANGED = re.compile(r"((?:^ *# Before: .*\n)+)^.*\n", re.M)


def undo_changes(name: str) -> tuple[str, int, int]:
    """Return an example as it was before; how many lines it has lost, and how many it has got."""
    counts = {"lost": 0, "got": 0}

    def undo(found: re.Match[str]) -> str:
        lines = re.sub("# Before: ", "", found[1])
        before = "" if lines.strip() == "nothing" else lines
        counts["lost"] += before.count("\n")
        counts["got"] += 1
        return before

    before = CHANGED.sub(undo, (EXAMPLES / name).read_text())
    assert "penstock." not in re.sub(r'""".*?"""', "", before, flags=re.S)
    return before, counts["lost"], counts["got"]


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that save_pretrained wrote, to one file or to several."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_loop_of_accelerate_learns_the_same_on_a_pipeline(tmp_path: Path) -> None:
    before, lost, got = undo_changes("from_accelerate.py")
    assert (5, 5) == (lost, got)
    folders = [tmp_path / "plain", tmp_path / "pipeline"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "plain.py").write_text(before)
    expected = launch(folders[0] / "plain.py", folders[0], num_ranks=1)
    printed = launch(EXAMPLES / "from_accelerate.py", folders[1])
    losses, found = (re.findall(r"loss (\S+)  norm (\S+)", text) for text in (expected, printed))
    assert 8 == len(found) == len(printed.splitlines())  # accelerate prints on one process.
    for ours, theirs in zip(found, losses, strict=True):
        # Four digits are printed.
        assert [float(x) for x in theirs] == pytest.approx([float(x) for x in ours], abs=1.1e-4)
    weights, ours = (
        load_folder(folder / "penstock-examples/from_accelerate") for folder in folders
    )
    assert weights.keys() == ours.keys()
    for name, weight in weights.items():
        # Microbatches add gradients in another order, and AdamW divides by their size.
        torch.testing.assert_close(ours[name], weight, atol=1e-4, rtol=0)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from trainer_runs import evaluate_different_batches, run
{line}
run(Trainer, {options})
"""
PLAIN = "from transformers import Trainer"
OURS = "from penstock.parallel.hugging_face_trainer import PipelineTrainer as Trainer"


def run_trainer(
    line: str, folder: Path, num_ranks: int, options: str = ""
) -> tuple[dict[str, Any], str]:
    """Run trainer_runs.py with a Trainer; return its logs, and what it prints."""
    folder.mkdir()
    script = folder / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(SCRIPT.format(tests=tests, line=line, options=options))
    printed = launch(script, folder, num_ranks=num_ranks)
    return json.loads((folder / "logs.json").read_text()), printed


def compare_runs(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compare the logs of two runs, except for times."""
    for name in ("whole", "resumed"):
        # The loss is computed in float32, whatever the model.
        assert theirs[f"{name} evaluated"] == pytest.approx(ours[f"{name} evaluated"], rel=1e-6)
        for expected, found in zip(theirs[name], ours[name], strict=True):
            kept = {key for key in expected if not key.endswith(("_second", "runtime", "_time"))}
            assert {key: expected[key] for key in kept} == pytest.approx(
                {key: found[key] for key in kept}, rel=1e-6
            )


def test_trainer_learns_the_same_on_a_pipeline(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "two", "one")]
    expected, _ = run_trainer(PLAIN, folders[0], 1)
    on_two, printed = run_trainer(OURS, folders[1], 2, "at_end=evaluate_different_batches")
    assert 2 == printed.count("the ranks have different batches")
    # What two ranks saved is resumed on one.
    on_one, _ = run_trainer(OURS, folders[2], 1, f"{str(folders[1] / 'whole/checkpoint-3')!r}")
    for folder, logs in zip(folders[1:], (on_two, on_one), strict=True):
        compare_runs(expected, logs)
        for name in ("whole", "resumed"):
            ours = load_folder(folder / name)
            weights = load_folder(folders[0] / name)
            assert weights.keys() == ours.keys()
            for key, weight in weights.items():
                torch.testing.assert_close(ours[key], weight, atol=1e-6, rtol=0)


def test_example_of_a_trainer_changes_two_lines_and_learns(tmp_path: Path) -> None:
    before, lost, got = undo_changes("from_trainer.py")
    assert (1, 2) == (lost, got)
    assert re.search("import .*, Trainer,", before)
    printed = launch(EXAMPLES / "from_trainer.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"'loss': '(\S+)'", printed)]
    assert 16 == len(losses)  # Of two epochs, printed on one rank.
    # 64 tokens: guessing costs log(64) = 4.16.
    assert 4.0 < losses[0] < 4.4
    evaluated = re.findall(r"evaluated: loss (\S+)", printed)
    assert 1 == len(evaluated)
    assert float(evaluated[0]) < 2.5
    model = LlamaForCausalLM.from_pretrained(tmp_path / "penstock-examples/from_trainer")
    tokens = torch.arange(128).reshape(-1, 16) * 7 % 64
    assert model(tokens, labels=tokens).loss < 2.5
