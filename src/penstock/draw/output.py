"""The way in: what a drawing is depends on where it goes."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from penstock.draw.panel import Panel, check_panels
from penstock.errors import DrawError
from penstock.extras import needed_by

PICTURES = (".png", ".svg")
_SUFFIXES = {
    ".html": "a page",
    ".json": "a trace for Perfetto",
    ".png": "a picture",
    ".svg": "a picture",
}


def show(panels: Sequence[Panel]) -> None:
    """Prints the panels in the terminal, under each other; needs `pip install 'penstock[draw]'`."""
    check_panels(panels)
    # What one drawing needs is not loaded for another: matplotlib takes a while.
    with needed_by("Drawing in the terminal", ["rich"], extra="draw", error=DrawError):
        from penstock.draw.in_terminal import print_panels
    print_panels(panels)


def save(panels: Sequence[Panel], path: str | PathLike[str], *, dark: bool = False) -> None:
    """Writes the panels to a file: a picture, a page or a trace, as its suffix says.

    Pictures need `pip install 'penstock[draw]'`. `dark` is for them; a page follows the reader's
    own setting.
    """
    check_panels(panels)
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(f"{known} for {what}" for known, what in _SUFFIXES.items())
        ending = f"ends in {suffix}" if suffix else "has no suffix"
        raise DrawError(f"{path} {ending}, and that is no kind of drawing. Use {known}.")
    try:
        _write(panels, Path(path), suffix, dark)
    except OSError as exc:
        raise DrawError(
            f"{path} cannot be written: {exc.strerror or exc}. "
            "Give a path in a folder that exists and that you may write to."
        ) from exc


def _write(panels: Sequence[Panel], path: Path, suffix: str, dark: bool) -> None:
    if suffix in PICTURES:
        from penstock.draw.picture_file import picture

        picture(panels, path, dark=dark)
    elif suffix == ".html":
        from penstock.draw.web_page import page

        path.write_text(page(panels), encoding="utf-8")
    else:
        from penstock.draw.perfetto import trace

        path.write_text(trace(panels), encoding="utf-8")
