"""The site shows docstrings as their authors meant them."""

from pathlib import Path

import griffe
import pytest

EXTENSION = Path(__file__).parents[2] / "scripts/docs/docstrings.py"


@pytest.mark.parametrize(
    ("expected", "docstring"),
    [
        ("Add.\n\n```pycon\n>>> add(1, 2)\n3\n```", "Add.\n\n>>> add(1, 2)\n3"),
        ("Steps:  \n[1] one\n    goes on;  \n[2] two.", "Steps:\n[1] one\n    goes on;\n[2] two."),
        ("One:\n\n    F0 >>> [1]\n\nTwo.", "One:\n\n    F0 >>> [1]\n\nTwo."),
    ],
)
def test_docstring_becomes_markdown(expected: str, docstring: str) -> None:
    files = {"__init__.py": f'"""{docstring}"""'}
    extensions = griffe.load_extensions(EXTENSION)
    with griffe.temporary_visited_package("package", files, extensions=extensions) as package:
        assert package.docstring
        assert expected == package.docstring.value.strip()
