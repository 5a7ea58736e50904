"""Draw losses over the steps of a training run, to see whether two runs agree."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

from penstock.draw.picture_look import Page, new_figure, page, plain_style, save
from penstock.errors import DrawError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Where curves coincide, the first is a band and the others are ever finer dashes on it.
_ALONE = 2.0
_WIDTHS = (4.0, 2.0, 1.6, 1.3)
_DASHES = ((4.0, 3.0), (1.2, 2.4), (6.0, 2.0, 1.0, 2.0))
_COLUMNS = 4  # Of the legend.


def loss_curves(
    curves: Mapping[str, Sequence[float]],
    path: str | PathLike[str],
    *,
    dark: bool = False,
) -> None:
    """Draw each curve with its name, and write an SVG or a PNG, by the suffix of `path`.

    Steps count from 1. Curves that coincide are both visible.
    """
    save(draw_curves(curves, dark=dark), path)


@plain_style()
def draw_curves(
    curves: Mapping[str, Sequence[float]],
    *,
    dark: bool = False,
) -> "Figure":
    """Return the curves as a matplotlib figure."""
    _check(curves)
    colours = page(dark=dark)
    more = 0.22 * ((len(curves) - 1) // _COLUMNS)  # For the other lines of the legend.
    height = 3.6 + more
    figure = new_figure(8.0, height, colours)
    axes = figure.add_axes((0.08, 0.5 / height, 0.89, 2.7 / height), facecolor=colours.paper)
    for number, (name, values) in enumerate(curves.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            label=name,
            color=colours.curves[number % len(colours.curves)],
            linewidth=_WIDTHS[min(number, len(_WIDTHS) - 1)] if len(curves) > 1 else _ALONE,
            linestyle="-" if number == 0 else (0.0, _DASHES[(number - 1) % len(_DASHES)]),
            marker="o" if len(values) == 1 else "",
            dash_capstyle="butt",
            solid_capstyle="butt",
        )
    _draw_frame(axes, colours)
    axes.legend(
        loc="lower right",  # Above the curves, so that it does not hide any.
        bbox_to_anchor=(1.0, 1.0),
        ncols=min(len(curves), _COLUMNS),
        frameon=False,
        borderaxespad=0.3,
        handlelength=3.2,
        columnspacing=1.6,
        fontsize=9,
        labelcolor=colours.ink,
    )
    return figure


def _check(curves: Mapping[str, Sequence[float]]) -> None:
    if not curves:
        raise DrawError('curves is empty. Expected at least one, such as {"1F1B": losses}.')
    for name, values in curves.items():
        if len(values) == 0:
            raise DrawError(f"The curve {name!r} has no values. Expected one for each step.")


def _draw_frame(axes: "Axes", colours: Page) -> None:
    """Draw rules across the page, and the names of the axes at their ends."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours.rule)
    axes.grid(axis="y", color=colours.idle, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(color=colours.rule, labelcolor=colours.faint_ink, labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step", color=colours.ink, fontsize=9, loc="right")
    axes.set_title("loss", color=colours.ink, fontsize=9, loc="left", pad=8)
