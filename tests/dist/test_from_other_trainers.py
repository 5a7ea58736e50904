"""Programs for other trainers run on a pipeline, and learn the same, with five lines changed."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
