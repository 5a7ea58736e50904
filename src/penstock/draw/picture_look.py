"""What all pictures have in common: the colours of the page, the type, and how a file is written.

Nothing here depends on the reader's own settings of matplotlib, and no file holds a date: a picture
changes only if what it shows does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import PurePath
from typing import TYPE_CHECKING

from penstock.errors import DrawError
from penstock.extras import needed_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
_PNG_DOTS_PER_INCH = 160


@dataclass(frozen=True, slots=True)
class Page:
    """The colours of a page; it is opaque, so a picture can be read wherever it is shown."""

    paper: str
    ink: str
    faint_ink: str
    rule: str
    idle: str
    memory: str
    curves: tuple[str, ...]


_LIGHT = Page(
    paper="#ffffff",
    ink="#1f2328",
    faint_ink="#656d76",
    rule="#c4cad1",
    idle="#e9ecf0",
    memory="#8c96a3",
    curves=("#56b4e9", "#d55e00", "#009e73", "#b0568f", "#a67c00"),
)
_DARK = Page(
    paper="#0d1117",
    ink="#e6edf3",
    faint_ink="#9198a1",
    rule="#3d444d",
    idle="#262c36",
    memory="#7d8896",
    curves=("#56b4e9", "#f0883e", "#2fb38a", "#db8bc0", "#f0b429"),
)


def page(*, dark: bool) -> Page:
    """The colours on white, or on the near black of dark web pages."""
    return _DARK if dark else _LIGHT


@contextmanager
def plain_style() -> Iterator[None]:
    """Matplotlib as it comes, with the font that it brings along, whatever the user has set."""
    with needed_by("A picture", ["matplotlib"], extra="draw", error=DrawError):
        from matplotlib import style
    settings = {
        "font.family": "DejaVu Sans",
        "text.parse_math": False,  # A dollar sign in a title is a dollar sign.
        "svg.fonttype": "path",  # Type looks the same where the font is missing.
        "svg.hashsalt": "penstock",
    }
    with style.context(["default", settings]):
        yield


def new_figure(width: float, height: float, colours: Page) -> "Figure":
    """An empty page, in inches, that no window and no other figure knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=colours.paper)
    FigureCanvasAgg(figure)
    return figure


@plain_style()
def save(figure: "Figure", path: str | PathLike[str]) -> None:
    """Writes an SVG or a PNG, as the suffix says; the same figure gives the same bytes."""
    suffix = PurePath(fspath(path)).suffix.lower()
    if suffix not in SUFFIXES:
        raise DrawError(
            f"The picture {fspath(path)!r} has the suffix {suffix!r}. "
            "Pictures are written as .svg or .png: name it so."
        )
    # A missing entry would be filled in with the time, or with the version of matplotlib.
    unset = ("Date", "Creator") if suffix == ".svg" else ("Software",)
    figure.savefig(
        path,
        format=suffix[1:],
        dpi=_PNG_DOTS_PER_INCH,
        metadata=dict.fromkeys(unset),
    )
