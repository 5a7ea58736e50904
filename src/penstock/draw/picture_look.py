"""The common parts of all pictures: the colours of the page, the font, and writing the file.

Nothing here depends on the user's own matplotlib settings, and files contain no date: a picture
changes only if its content does.
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
    """Return the colours on white, or on the near black of dark web pages."""
    return _DARK if dark else _LIGHT


@contextmanager
def plain_style() -> Iterator[None]:
    """Use matplotlib's defaults and the font it includes, whatever the user has set."""
    with needed_by("A picture", ["matplotlib"], extra="draw", error=DrawError):
        from matplotlib import style
    settings = {
        "font.family": "DejaVu Sans",
        "text.parse_math": False,  # A dollar sign in a title is a dollar sign.
        "svg.fonttype": "path",  # Text looks the same where the font is missing.
        "svg.hashsalt": "penstock",
    }
    with style.context(["default", settings]):
        yield


def new_figure(width: float, height: float, colours: Page) -> "Figure":
    """Return an empty page, sized in inches, that does not depend on windows or other figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=colours.paper)
    FigureCanvasAgg(figure)
    return figure


@plain_style()
def save(figure: "Figure", path: str | PathLike[str]) -> None:
    """Write an SVG or a PNG, by the suffix; the same figure gives the same bytes."""
    suffix = PurePath(fspath(path)).suffix.lower()
    if suffix not in SUFFIXES:
        raise DrawError(
            f"The picture {fspath(path)!r} has the suffix {suffix!r}. "
            "Expected .svg or .png. Change the file name."
        )
    # A missing entry would be filled in with the time, or with the version of matplotlib.
    unset = ("Date", "Creator") if suffix == ".svg" else ("Software",)
    figure.savefig(
        path,
        format=suffix[1:],
        dpi=_PNG_DOTS_PER_INCH,
        metadata=dict.fromkeys(unset),
    )
