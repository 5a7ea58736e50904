"""Links that work in the repository lead to pages on the site."""

from pathlib import Path

import pytest

from repository_links import find_linked_files, lead_links, name_links

PAGES = {
    "docs/other.md": "other.md",
    "examples/train.py": "source/examples/train.py.md",
    "README.md": "source/README.md.md",
    "docs/pictures/a.svg": "pictures/a.svg",
}


def lead(text: str, *, document: str = "docs/guide.md", page: str = "guide.md") -> str:
    return lead_links(text, document=document, page=page, page_of=PAGES.get)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("[a](source/examples/train.py.md)", "[a](../examples/train.py)"),
        ("[`a`](source/examples/train.py.md)", "[`a`](../examples/train.py)"),
        ("[a](source/README.md.md#use-it)", "[a](../README.md#use-it)"),
        ("[a](other.md)", "[a](other.md)"),
        ('<img src="pictures/a.svg">', '<img src="pictures/a.svg">'),
    ],
)
def test_link_of_a_guide_leads_to_the_page(expected: str, text: str) -> None:
    assert expected == lead(text)


def test_link_leads_there_from_a_page_in_a_folder() -> None:
    text = "[a](../../examples/train.py)"
    led = lead(text, document="docs/api/sim.md", page="api/sim.md")
    assert "[a](../source/examples/train.py.md)" == led


def test_document_that_moved_leads_back_to_the_docs_and_their_pictures() -> None:
    text = '[a](docs/other.md) <img srcset="docs/pictures/a.svg">'
    led = lead(text, document="README.md", page="source/README.md.md")
    assert '[a](../other.md) <img srcset="../pictures/a.svg">' == led


@pytest.mark.parametrize(
    "text",
    [
        "[a](../examples/missing.py)",
        "[a](https://example.org/examples/train.py)",
        "[a](#here)",
        "`[a](../examples/train.py)`",
        "```\n[a](../examples/train.py)\n```",
    ],
)
def test_all_else_stays_as_it_is(text: str) -> None:
    assert text == lead(text)


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_linked_files_are_found_through_documents_and_in_folders(tmp_path: Path) -> None:
    files = {
        "docs/guide.md": "[a](../one.md) [b](other.md) [c](../missing.py) [d](../../outside.py)",
        "docs/other.md": "`[a](../quoted.py)`",
        "one.md": "[a](two.py) [b](results) [c](docs/guide.md)",
        "two.py": "",
        "quoted.py": "",
        "results/a.json": "{}",
        "results/empty": "",
        "results/deeper/b.json": "{}",
    }
    write(tmp_path, files)
    found = find_linked_files(tmp_path, ["docs/guide.md", "docs/other.md"])
    assert {"one.md", "two.py", "results/a.json"} == found


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("[Title of docs/plan.md](plan.md)", "[plan.md](plan.md)"),
        ("[Title of docs/plan.md](plan.md#limits)", "[plan.md](plan.md#limits)"),
        ("[Title of README.md](../README.md)", "[README.md](../README.md)"),
        ("[another name](plan.md)", "[another name](plan.md)"),
        ("[train.py](../examples/train.py)", "[train.py](../examples/train.py)"),
        ("`[plan.md](plan.md)`", "`[plan.md](plan.md)`"),
    ],
)
def test_link_called_as_its_file_is_called_by_the_title(expected: str, text: str) -> None:
    named = name_links(text, document="docs/guide.md", title_of=lambda path: f"Title of {path}")
    assert expected == named
