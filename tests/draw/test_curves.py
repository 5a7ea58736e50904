from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from penstock.draw.curves import draw_curves, loss_curves
from penstock.errors import DrawError

LOSSES = [3.0, 2.5, 2.25, 2.0]


def test_curves_are_drawn_over_their_steps_under_their_names() -> None:
    (axes,) = draw_curves({"1F1B": LOSSES, "ZB-V": LOSSES[:2]}).axes
    drawn = [(line.get_label(), *map(list, line.get_data())) for line in axes.lines]
    assert [("1F1B", [1, 2, 3, 4], LOSSES), ("ZB-V", [1, 2], LOSSES[:2])] == drawn
    legend = axes.get_legend()
    assert legend is not None
    assert ["1F1B", "ZB-V"] == [text.get_text() for text in legend.get_texts()]


def test_curves_that_coincide_are_a_band_with_narrower_dashes_on_it() -> None:
    first, *others = draw_curves(dict.fromkeys("abcdef", LOSSES)).axes[0].lines
    assert not first.is_dashed()
    assert all(other.is_dashed() for other in others)
    assert all(other.get_linewidth() < first.get_linewidth() / 1.5 for other in others)


def test_no_two_of_many_curves_look_the_same() -> None:
    names = "abcdefghijkl"
    (axes,) = draw_curves(dict.fromkeys(names, LOSSES)).axes
    looks = {(line.get_color(), str(line._dash_pattern)) for line in axes.lines}
    assert len(names) == len(looks)


def test_curve_of_one_step_is_a_point() -> None:
    (line,) = draw_curves({"1F1B": [3.0]}).axes[0].lines
    assert "o" == line.get_marker()


def test_axes_are_named() -> None:
    (axes,) = draw_curves({"1F1B": LOSSES}).axes
    assert ("step", "loss") == (axes.get_xlabel(), axes.get_title(loc="left"))


@pytest.mark.parametrize(("dark", "paper"), [(False, "#ffffff"), (True, "#0d1117")])
def test_page_of_curves_is_opaque(dark: bool, paper: str) -> None:
    figure = draw_curves({"1F1B": LOSSES}, dark=dark)
    assert paper + "ff" == to_hex(figure.get_facecolor(), True)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_same_curves_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"]
    for path in paths:
        loss_curves({"1F1B": LOSSES, "ZB-V": LOSSES}, path)
    first, second = (path.read_bytes() for path in paths)
    assert len(first) > 1000
    assert first == second


def test_no_curves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DrawError, match=r"curves is empty\. Expected at least one"):
        loss_curves({}, tmp_path / "loss.svg")


def test_curve_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrawError, match=r"The curve 'ZB-V' has no values\. Expected one for each"):
        loss_curves({"1F1B": LOSSES, "ZB-V": []}, tmp_path / "loss.svg")
