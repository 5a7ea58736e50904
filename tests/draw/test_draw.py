"""What is drawn depends on the suffix, and what cannot be drawn is said."""

import json
from pathlib import Path

import pytest
from panels import panel, unit_panel

from penstock import draw
from penstock.errors import DrawError


def test_show_prints_every_panel(capsys: pytest.CaptureFixture[str]) -> None:
    draw.show([panel("1F1B"), unit_panel("ZB-H1")])
    printed = capsys.readouterr().out
    assert printed.startswith("1F1B\nmakespan 33")
    assert "ZB-H1, measured\nmakespan 328.4 ms" in printed


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.svg", b"<?xml"),
        ("a.png", b"\x89PNG"),
        ("a.html", b"<!doctype html>"),
        ("a.json", b'{"displayTimeUnit"'),
        ("a.b.JSON", b'{"displayTimeUnit"'),
    ],
)
def test_suffix_chooses_the_drawing(tmp_path: Path, name: str, start: bytes) -> None:
    draw.save([panel("1F1B", 2, 2)], tmp_path / name)
    assert start.lower() == (tmp_path / name).read_bytes()[: len(start)].lower()


def test_path_may_be_text(tmp_path: Path) -> None:
    draw.save([panel()], str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a.pdf", r"a\.pdf ends in \.pdf, which is not a kind of drawing"),
        ("a", "a has no suffix, which is not a kind of drawing"),
    ],
)
def test_unknown_suffix_is_rejected_with_the_known_ones(name: str, problem: str) -> None:
    with pytest.raises(DrawError, match=problem) as caught:
        draw.save([panel()], name)
    assert str(caught.value).endswith(
        "Use .html for a page, .json for a trace for Perfetto, .png for a picture, "
        ".svg for a picture."
    )


def test_no_panels_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DrawError, match=r"nothing to draw: panels is empty\. Give at least one"):
        draw.save([], tmp_path / "a.json")
    with pytest.raises(DrawError, match=r"nothing to draw: panels is empty\. Give at least one"):
        draw.show([])


@pytest.mark.parametrize("suffix", ["html", "svg"])
def test_path_that_cannot_be_written_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "missing" / f"a.{suffix}"
    with pytest.raises(DrawError, match=r"No such file or directory\. Give a path in") as caught:
        draw.save([panel("1F1B", 2, 2)], path)
    assert str(caught.value).startswith(f"{path} cannot be written")
