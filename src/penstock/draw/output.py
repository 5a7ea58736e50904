"""Draw panels in the terminal, or in a file whose suffix decides the kind of drawing."""

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
    """Print the panels in the terminal, one below the other.

    Needs `pip install 'penstock[draw]'`.
    """
    check_panels(panels)
    # Each kind of drawing loads only what it needs: matplotlib takes a while.
    with needed_by("Drawing in the terminal", ["rich"], extra="draw", error=DrawError):
        from penstock.draw.in_terminal import print_panels
    print_panels(panels)


def save(panels: Sequence[Panel], path: str | PathLike[str], *, dark: bool = False) -> None:
    """Write the panels to a file: a picture, a page or a trace, depending on its suffix.

    Pictures need `pip install 'penstock[draw]'`. `dark` applies to them only; a page follows the
    reader's own setting.
    """
    check_panels(panels)
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(f"{known} for {what}" for known, what in _SUFFIXES.items())
        ending = f"ends in {suffix}" if suffix else "has no suffix"
        raise DrawError(f"{path} {ending}, which is not a kind of drawing. Use {known}.")
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
