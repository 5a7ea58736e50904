from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from panels import beneath_panel, memory_panel, overlap_panel, panel, schedule, unit_panel

from penstock.costs import CostTable
from penstock.draw.colours import colour
from penstock.draw.panel import Kind, Panel, bars
from penstock.draw.picture_file import draw_figure, picture
from penstock.errors import DrawError
from penstock.sim import simulate
from penstock.timeline import Report


def axes_of(figure: Figure, label: str) -> Axes:
    (found,) = (axes for axes in figure.axes if axes.get_label() == label)
    return found


def collection(axes: Axes, name: str) -> PolyCollection:
    (found,) = (
        artist
        for artist in axes.collections
        if isinstance(artist, PolyCollection) and artist.get_gid() == name
    )
    return found


def boxes(axes: Axes, name: str = "bars") -> list[tuple[float, float, float, float]]:
    """Start, end, top and bottom of each."""
    extents = [path.get_extents() for path in collection(axes, name).get_paths()]
    return [(box.x0, box.x1, box.y0, box.y1) for box in extents]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def all_bars(report: Report) -> list[tuple[float, float]]:
    ranks = range(len(report.ranks))
    return [(bar.start, bar.end) for rank in ranks for bar in bars(report, rank)]


@pytest.mark.parametrize("drawn", [panel(), overlap_panel()])
def test_every_bar_is_drawn_at_its_time(drawn: Panel) -> None:
    axes = axes_of(draw_figure([drawn]), drawn.title)
    assert all_bars(drawn.report) == [(start, end) for start, end, *_ in boxes(axes)]


def test_bars_of_a_rank_lie_on_its_lane_of_idle_time() -> None:
    drawn = panel("ZB-H1", 3, 5)
    axes = axes_of(draw_figure([drawn]), drawn.title)
    idle = boxes(axes, "idle")
    assert [(0.0, drawn.report.makespan)] * 3 == [(start, end) for start, end, *_ in idle]
    lanes = [(top, bottom) for *_, top, bottom in idle]
    ranks = [rank for rank in range(3) for _ in bars(drawn.report, rank)]
    assert [lanes[rank] for rank in ranks] == [(top, bottom) for *_, top, bottom in boxes(axes)]


def test_halves_of_an_overlap_share_the_height() -> None:
    drawn = overlap_panel()
    found = boxes(axes_of(draw_figure([drawn]), drawn.title))
    kinds = [bar.half for rank in range(4) for bar in bars(drawn.report, rank)]
    at = kinds.index("upper")
    (*_, top, middle), (*_, other_middle, bottom) = found[at : at + 2]
    assert "lower" == kinds[at + 1]
    assert middle == other_middle
    assert (0.0, 0.15, 0.30) == pytest.approx((top, middle, bottom))


def test_colours_are_by_kind_and_paler_for_the_later_stage_of_a_rank() -> None:
    drawn = panel("ZB-V", 2, 4)
    fills = collection(axes_of(draw_figure([drawn]), "ZB-V"), "bars").get_facecolor()
    first_rank = list(bars(drawn.report, 0))  # It holds stages 0 and 3.
    expected = [colour(bar.kind, int(bar.action.stage == 3), 2) for bar in first_rank]
    assert expected == [to_hex(fill) for fill in fills[: len(first_rank)]]
    assert 6 == len(set(expected))


def test_microbatch_numbers_are_in_the_middle_of_their_bars() -> None:
    drawn = panel("1F1B", 2, 3)
    figure = draw_figure([drawn])
    numbers = [text for text in axes_of(figure, "1F1B").texts if text.get_text().isdigit()]
    found = [(text.get_text(), text.get_position()[0]) for text in numbers]
    expected = [
        (str(bar.action.mb), (bar.start + bar.end) / 2)
        for rank in range(2)
        for bar in bars(drawn.report, rank)
    ]
    assert expected == found


def test_numbers_that_do_not_fit_are_left_out() -> None:
    # Stage 0 is so quick that its forwards are hairlines.
    costs = CostTable(forward=[0.01, 1.0], backward_input=[1.0, 1.0], backward_weight=[1.0, 1.0])
    drawn = panel("1F1B", 2, 4, costs=costs)
    written = texts(axes_of(draw_figure([drawn]), "1F1B"))
    assert 3 * 4 == sum(text.isdigit() for text in written)


def test_many_bars_are_drawn_in_one_piece_without_numbers() -> None:
    drawn = panel("ZB-H1", 16, 64)
    axes = axes_of(draw_figure([drawn]), "ZB-H1")
    assert 16 * 64 * 3 == len(boxes(axes))
    assert not any(text.isdigit() for text in texts(axes))
    assert 0 == len(axes.patches)


def test_title_facts_ranks_and_bubbles_are_written() -> None:
    drawn = unit_panel("1F1B", 2, 3)
    figure = draw_figure([drawn])
    written = [text.get_text() for text in figure.texts]
    assert [drawn.title, drawn.facts, "bubble", "memory", "peak"] == written
    report = drawn.report
    labels = [text for text in texts(axes_of(figure, drawn.title)) if not text.isdigit()]
    bubbles = [f"{rank.idle.total / report.makespan:.1%}" for rank in report.ranks]
    assert ["rank 0", bubbles[0], "rank 1", bubbles[1], "time, ms"] == labels


def test_panels_in_one_unit_have_one_time_axis_and_others_their_own() -> None:
    drawn = [panel("1F1B"), panel("ZB-H1"), unit_panel("ZB-V")]
    figure = draw_figure(drawn)
    ends = [drawn[0].report.makespan] * 2 + [drawn[2].report.makespan]
    for suffix in ("", ": memory"):
        found = [axes_of(figure, panel.title + suffix).get_xlim() for panel in drawn]
        assert [(0.0, end) for end in ends] == found
    ticked = [len(axes_of(figure, panel.title).get_xticks()) > 0 for panel in drawn]
    assert [False, True, True] == ticked


@pytest.mark.parametrize(
    ("scale", "label", "ticks"),
    [
        (1.0, "time, s", list("0123456789")),
        (1e-3, "time, ms", list("0123456789")),
        (1e-8, "time, µs", ["0", *(f"0.0{n}" for n in range(1, 10))]),
    ],
)
def test_seconds_are_shown_in_the_unit_that_makes_them_short(
    scale: float, label: str, ticks: list[str]
) -> None:
    costs = CostTable.uniform(1, forward=scale, backward_input=scale, backward_weight=scale)
    drawn = Panel("measured", simulate(schedule("1F1B", 1, 3), costs), "s")
    axes = axes_of(draw_figure([drawn]), "measured")
    assert label == texts(axes)[-1]
    assert ticks == [tick.get_text() for tick in axes.get_xticklabels()]


def test_memory_is_drawn_on_one_scale_with_each_ranks_peak() -> None:
    drawn = [panel("1F1B", 2, 4), panel("GPipe", 2, 4)]
    figure = draw_figure(drawn)
    shares = []
    for one in drawn:
        axes = axes_of(figure, f"{one.title}: memory")
        peaks = [one.memory(rank.peak_memory) for rank in one.report.ranks]
        assert peaks == texts(axes)
        for patch in axes.patches:
            assert isinstance(patch, StepPatch)
            curve = patch.get_data()
            shares.append((curve.baseline - min(curve.values)) / 0.30)
    assert [2 / 4, 1 / 4, 1.0, 1.0] == pytest.approx(shares)


def test_memory_curve_has_the_steps_of_the_report() -> None:
    drawn = panel("ZB-H1", 2, 3)
    patch = axes_of(draw_figure([drawn]), "ZB-H1: memory").patches[1]
    assert isinstance(patch, StepPatch)
    points = drawn.report.memory(1)
    times = [*(point.time for point in points), drawn.report.makespan]
    assert times == list(patch.get_data().edges)


def test_cap_is_a_line_over_each_ranks_memory() -> None:
    drawn = Panel("1F1B", panel("1F1B", 2, 4).report, caps=(3.0, 1.0))
    axes = axes_of(draw_figure([drawn]), "1F1B: memory")
    found = [lines for lines in axes.collections if lines.get_gid() == "cap"]
    levels = [lines.get_paths()[0].vertices[0][1] for lines in found]
    bottoms = [0.30, 0.66]
    expected = [bottoms[0] - 0.30, bottoms[1] - 0.30 * 1 / 3]
    assert expected == pytest.approx(levels)


def test_legend_names_the_cap_where_there_is_one() -> None:
    plain = panel("1F1B", 2, 4)
    for caps, expected in (((), []), ((3.0, 1.0), ["cap of the memory"])):
        (legend,) = draw_figure([Panel("1F1B", plain.report, caps=caps)]).legends
        written = [text.get_text() for text in legend.get_texts()]
        assert ["forward", "full backward", "idle", *expected] == written


def test_cap_far_above_the_memory_is_not_drawn() -> None:
    drawn = Panel("1F1B", panel("1F1B", 2, 4).report, caps=(3.0, 1000.0))
    axes = axes_of(draw_figure([drawn]), "1F1B: memory")
    assert 1 == sum(lines.get_gid() == "cap" for lines in axes.collections)


def test_memory_can_be_left_out() -> None:
    figure = draw_figure([panel()], memory=False)
    assert ["1F1B"] == [axes.get_label() for axes in figure.axes]
    assert figure.get_figwidth() < draw_figure([panel()]).get_figwidth()


def test_what_lies_beneath_is_in_thinner_lanes_called_simulated() -> None:
    drawn = beneath_panel()
    assert drawn.beneath is not None
    axes = axes_of(draw_figure([drawn]), drawn.title)
    assert 4 == texts(axes).count("simulated")
    assert len(all_bars(drawn.report)) * 2 == len(boxes(axes))
    idle = boxes(axes, "idle")
    assert [drawn.report.makespan, drawn.beneath.makespan] * 4 == [end for _, end, *_ in idle]
    assert [0.30, 0.15] * 4 == pytest.approx([bottom - top for *_, top, bottom in idle])
    tops = [top for *_, top, _ in idle]
    assert sorted(tops) == tops


def test_time_axis_has_room_for_a_longer_timeline_beneath() -> None:
    slow, quick = panel("1F1B").report, panel("ZB-H1").report
    figure = draw_figure([Panel("both", quick, beneath=slow)])
    assert (0.0, slow.makespan) == axes_of(figure, "both").get_xlim()


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([panel("1F1B")], ["forward", "full backward", "idle"]),
        (
            [panel("1F1B"), panel("ZB-V")],
            [*[kind.words for kind in Kind][:4], "paler: later stages of the rank", "idle"],
        ),
    ],
)
def test_legend_names_the_kinds_of_all_panels_once(drawn: list[Panel], expected: list[str]) -> None:
    (legend,) = draw_figure(drawn).legends
    assert expected == [text.get_text() for text in legend.get_texts()]


def test_timeline_without_times_and_memory_is_drawn(tmp_path: Path) -> None:
    costs = CostTable.uniform(
        2, forward=0.0, backward_input=0.0, backward_weight=0.0, after_forward=0.0, after_input=0.0
    )
    drawn = panel("1F1B", 2, 3, costs=costs)
    picture([drawn], tmp_path / "empty.svg")
    assert (0.0, 1.0) == axes_of(draw_figure([drawn]), "1F1B").get_xlim()


@pytest.mark.parametrize(("dark", "paper"), [(False, "#ffffff"), (True, "#0d1117")])
def test_page_is_opaque(dark: bool, paper: str) -> None:
    assert paper + "ff" == to_hex(draw_figure([panel()], dark=dark).get_facecolor(), True)


def test_dollars_in_a_title_are_written_as_they_are(tmp_path: Path) -> None:
    drawn = panel(title="costs $1, then \\frac$")
    picture([drawn], tmp_path / "dollars.svg")
    assert not draw_figure([drawn]).texts[0].get_parse_math()


@pytest.mark.parametrize("suffix", [".png", ".SVG"])
def test_same_panels_give_the_same_bytes_whatever_matplotlib_is_set_to(
    tmp_path: Path, suffix: str
) -> None:
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    picture([panel("ZB-V", 2, 4)], first)
    mine = {"font.size": 30.0, "savefig.dpi": 20.0, "figure.facecolor": "red", "axes.grid": True}
    with matplotlib.rc_context(mine):
        before = dict(matplotlib.rcParams)
        picture([panel("ZB-V", 2, 4)], str(second))
        assert before == dict(matplotlib.rcParams)
    assert first.read_bytes() == second.read_bytes()
    assert (b"\x89PNG" if suffix == ".png" else b"<?xml") == first.read_bytes()[:5].rstrip(b"\r")


def test_svg_has_no_date_and_is_small_enough_for_a_readme(tmp_path: Path) -> None:
    path = tmp_path / "three.svg"
    picture([panel("1F1B"), panel("ZB-H1"), panel("ZB-V")], path)
    svg = path.read_text()
    assert "<dc:date>" not in svg
    assert "Matplotlib v" not in svg
    assert len(svg) < 300_000


def test_no_panels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DrawError, match=r"panels is empty\. Give at least one"):
        picture([], tmp_path / "none.svg")


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DrawError, match=r"has the suffix '\.pdf'\. Expected \.svg or \.png\. Change"
    ):
        picture([panel()], tmp_path / "timeline.pdf")
    assert [] == list(tmp_path.iterdir())


def test_measured_memory_is_a_line_over_the_planned() -> None:
    drawn = memory_panel("1F1B", 2, 4)
    figure = draw_figure([drawn])
    lines = [line for line in figure.axes[1].patches if line.get_gid() == "measured"]
    assert 2 == len(lines)
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert ["64 MiB", "65 MiB", "32 MiB", "33 MiB"] == texts
    (legend,) = figure.legends
    assert "measured memory" == legend.get_texts()[-1].get_text()
