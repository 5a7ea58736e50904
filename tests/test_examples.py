"""Every example runs and prints what it printed when it was reviewed."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# The others are run by tests/dist/test_examples_on_ranks.py.
IN_ONE_PROCESS = [example for example in EXAMPLES if "torchrun" not in example.read_text()]


@pytest.mark.parametrize("example", IN_ONE_PROCESS, ids=lambda path: path.stem)
def test_example_prints_its_golden_output(
    example: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # For what it writes.
    golden = ROOT / "tests" / "golden" / f"example_{example.stem}.txt"
    runpy.run_path(str(example), run_name="__main__")
    assert golden.read_text() == capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text()
    assert text.startswith('"""Shows: ')
    assert text.count("\n") < 80
