"""The example of the README runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_of_the_readme_runs() -> None:
    text = README.read_text()
    [example] = re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL)
    # The empty lines make a traceback show the lines of the README.
    lines_before = "\n" * text[: example.start(1)].count("\n")
    exec(compile(lines_before + example[1], README, "exec"), {})
