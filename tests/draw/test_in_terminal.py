"""What a terminal shows of a schedule can be read, and is true.

After a change that is meant, `PENSTOCK_UPDATE_GOLDEN=1 pytest tests/draw/test_in_terminal.py`
writes the drawings in tests/golden anew. Review them like code.
"""

import io
import os
from pathlib import Path

import pytest
from panels import beneath_panel, memory_panel, overlap_panel, panel, unit_panel
from rich.cells import cell_len
from rich.console import Console

from penstock.costs import CostTable
from penstock.draw.colours import colour
from penstock.draw.in_terminal import print_panels, terminal
from penstock.draw.panel import Kind, Panel

GOLDEN = Path(__file__).parents[1] / "golden"


def text(*panels: Panel, width: int = 100, memory: bool = True) -> str:
    """The drawing without colours."""
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(terminal(panels, width=width, colour=False, memory=memory))
    return written(console)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lane(drawing: str, rank: int = 0) -> str:
    """What the first panel shows of a rank, from its name on."""
    return next(line for line in drawing.splitlines() if line.startswith(f"rank {rank} "))


def coloured(*panels: Panel, width: int = 100) -> list[tuple[str, str, str]]:
    """Text, colour and background of all that is drawn, in order."""
    console = Console(width=width)
    found = []
    for segment in console.render(terminal(panels, width=width, colour=True)):
        style = segment.style
        front, back = (style.color, style.bgcolor) if style else (None, None)
        found.append((segment.text, front.name if front else "", back.name if back else ""))
    return found


@pytest.mark.parametrize(
    ("name", "drawn"),
    [("draw_1f1b_and_zb_h2.txt", ("1F1B", "ZB-H2")), ("draw_dualpipev.txt", ())],
    ids=["two panels", "overlaps"],
)
def test_drawing_is_as_reviewed(name: str, drawn: tuple[str, ...]) -> None:
    found = text(*(panel(schedule) for schedule in drawn) if drawn else [overlap_panel()])
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN") == "1":
        (GOLDEN / name).write_text(found)
    assert (GOLDEN / name).read_text() == found


def test_lane_has_letters_and_microbatches_where_there_is_no_colour() -> None:
    # Two characters for each unit of time: 33 units do not fit three times.
    expected = "rank 1  ··F0F1F2········B0──F3B1──F4B2──F5B3──F6B4──F7B5──··B6──··B7──····"
    assert expected == lane(text(panel()), 1)[: len(expected)]


def test_lane_ends_with_the_bubble_and_the_peak_memory_of_its_rank() -> None:
    assert ["33.1%", "128", "MiB"] == lane(text(beneath_panel())).split()[-3:]


def test_figures_are_left_out_where_there_is_no_room() -> None:
    drawing = text(panel(), width=59)
    assert "bubble  peak" not in drawing
    assert lane(drawing).endswith("B7")
    assert "bubble  peak" in text(panel(), width=60)


def test_later_stages_of_a_rank_are_in_lower_case() -> None:
    drawing = text(panel("ZB-V"))
    assert lane(drawing, 3).startswith("rank 3  ···FfFfFfFfiwFIW")
    assert "lower case: a later stage of the rank" in drawing


def test_overlap_shows_both_halves() -> None:
    drawing = text(overlap_panel(ranks=2, microbatches=5), width=160)
    assert "F3&b1" in lane(drawing)
    assert "& both at once" in drawing


def test_overlap_without_room_for_two_letters_is_a_sign() -> None:
    drawing = text(overlap_panel(ranks=2, microbatches=40), width=60)
    assert "&" in lane(drawing)
    assert "F&b" not in drawing


@pytest.mark.parametrize("width", [40, 61, 250])
@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    drawing = text(panel(name), unit_panel("ZB-H1"), width=width)
    assert all(cell_len(line) <= width for line in drawing.splitlines())


def test_figures_end_at_the_width() -> None:
    rows = [line for line in text(unit_panel(), width=97).splitlines() if line.endswith("MiB")]
    assert [97] * 4 == [len(row) for row in rows if row.startswith("rank")]


@pytest.mark.parametrize("width", [-1, 39])
def test_width_that_is_too_small_draws_as_40(width: int) -> None:
    console = Console(width=40, color_system=None, file=io.StringIO())
    console.print(terminal([panel()], width=width, colour=False))
    assert text(panel(), width=40) == written(console)


def test_rows_are_cut_off_where_the_console_is_narrower() -> None:
    console = Console(width=20, color_system=None, file=io.StringIO())
    print_panels([panel()], console)
    rows = [line for line in written(console).splitlines() if line.startswith("rank")]
    assert 8 == len(rows)
    assert "rank 0  FFFF······B0" == rows[0]


def test_panels_of_one_unit_share_their_axis() -> None:
    drawing = text(panel("1F1B"), panel("ZB-H2"), unit_panel())
    axes = [line.split("  bubble")[0].rstrip() for line in drawing.splitlines() if "|0" in line]
    assert 3 == len(axes)
    assert axes[0] == axes[1]
    assert "100 ms" in axes[2]
    assert "ms" not in axes[0]


def test_tick_is_above_the_time_it_names() -> None:
    lines = text(panel()).splitlines()
    axis = next(line for line in lines if "|0" in line)
    # In 1F1B with 4 ranks, the first backward of rank 0 starts at 10.
    assert axis.index("|10") == lane("\n".join(lines)).index("B0")


def test_shorter_panel_is_blank_behind_its_end() -> None:
    drawing = text(panel("ZB-H2"), panel("1F1B"), memory=False)
    assert lane(drawing)[8:].split("  ")[0].endswith("W6I7W7······")
    assert lane(drawing, 3)[8:].split("  ")[0].endswith("W6W7")


def test_memory_is_as_high_as_the_largest_of_all_panels() -> None:
    drawing = text(panel("GPipe"), panel("1F1B"))
    assert 2 == drawing.count("memory, ▇ is 8")
    curves = [line for line in drawing.splitlines() if set(line) & set("▁▂▃▄▅▆▇")]
    # A heading and four ranks each; rank 0 of 1F1B holds up to 4 of 8.
    assert "▇" == max(curves[1][8:])
    assert "▃" == max(curves[6][8:])


def test_memory_can_be_left_out() -> None:
    drawing = text(panel(), memory=False)
    assert "memory," not in drawing
    assert not set(drawing) & set("▁▂▃▄▅▆▇")
    assert ["27.3%", "4"] == lane(drawing).split()[-2:]


def test_beneath_is_a_lane_of_its_own() -> None:
    lines = text(beneath_panel()).splitlines()
    assert "simulated: makespan 330 ms" in lines[2]
    below = next(lines[n + 1] for n, line in enumerate(lines) if line.startswith("rank 0"))
    assert below.startswith("simulated  F0F1F")


def test_bars_have_the_colour_of_their_kind_and_the_number_of_their_microbatch() -> None:
    drawn = coloured(panel())
    assert ("3 ", "#14181d", colour(Kind.FORWARD)) in drawn
    assert ("7   ", "#14181d", colour(Kind.BACKWARD)) in drawn


def test_later_stages_are_paler() -> None:
    grounds = {back for _, _, back in coloured(panel("ZB-V"))}
    assert {colour(Kind.FORWARD, 0, 2), colour(Kind.FORWARD, 1, 2)} <= grounds


def test_overlap_is_split_into_an_upper_and_a_lower_colour() -> None:
    halves = {(front, back) for shown, front, back in coloured(overlap_panel()) if "▀" in shown}
    assert (colour(Kind.FORWARD, 0, 2), colour(Kind.BACKWARD, 1, 2)) in halves


def test_beneath_is_half_as_high_in_colour() -> None:
    assert ("▀", colour(Kind.BACKWARD), "") in coloured(beneath_panel())


def test_numbers_do_not_run_into_each_other() -> None:
    # 84 characters for 42 forwards: two digits would fill each of them.
    shown = [part for part, _, back in coloured(panel("ForwardOnly", 3, 40)) if back]
    assert "9 " in shown
    assert "▏ " in shown
    assert "10" not in shown


def test_bar_that_is_spread_over_two_characters_by_chance_has_no_mark() -> None:
    assert not any("▏" in part for part, _, _ in coloured(panel("ZB-H1", 8, 32), width=120))


def test_bars_far_narrower_than_a_character_have_no_numbers() -> None:
    shown = [part for part, _, back in coloured(panel("1F1B", 4, 200), width=60) if back]
    assert {"", " F ", " B "} == {part.strip(" ") and part for part in shown}


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_without_colours_gets_letters(environment: dict[str, str]) -> None:
    console = Console(
        width=100, force_terminal=True, file=io.StringIO(), _environ={"TERM": "xterm"} | environment
    )
    print_panels([panel()], console)
    assert "rank 0  F0F1F" in written(console)


def test_terminal_with_colours_gets_colours() -> None:
    console = Console(
        width=100, force_terminal=True, color_system="truecolor", file=io.StringIO(), _environ={}
    )
    print_panels([panel()], console)
    assert "48;2;86;180;233m" in written(console)
    assert "F0F1" not in written(console)


def test_console_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    console = Console(width=100, file=io.TextIOWrapper(raw, encoding="ascii"), _environ={})
    print_panels([panel(), overlap_panel(), beneath_panel()], console)
    console.file.flush()
    drawing = raw.getvalue().decode("ascii")
    assert "rank 0     F0F1F" in drawing
    assert "memory, 7 is 4" in drawing


def test_colours_take_a_console_with_unicode() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(
        width=100, force_terminal=True, color_system="truecolor", file=file, _environ={}
    )
    print_panels([overlap_panel()], console)
    file.flush()
    assert "F&b" in raw.getvalue().decode("ascii")


def test_title_is_not_taken_for_markup() -> None:
    assert text(panel(title="[red]1F1B[/red]")).startswith("[red]1F1B[/red]\n")


def test_actions_that_take_no_time_are_not_shown() -> None:
    drawing = text(panel("ZB-H1", costs=CostTable.uniform(4, backward_weight=0)))
    assert "W" not in drawing
    assert "rank 3  ·········F0─I0─F1─I1─" in drawing


def test_schedule_that_takes_no_time_is_drawn() -> None:
    nothing = CostTable.uniform(4, forward=0, backward_input=0, backward_weight=0)
    drawing = text(panel(costs=nothing))
    assert lane(drawing).split() == ["rank", "0", "0.0%", "4"]


def test_measured_memory_is_beside_and_beneath_the_planned() -> None:
    found = text(memory_panel("1F1B", 2, 4))
    assert lane(found).endswith("64 MiB    65 MiB")
    assert 1 == sum(line.endswith("peak  measured") for line in found.splitlines())
    assert 2 == sum(line.startswith("measured ") for line in found.splitlines())
    assert "measured" not in text(panel())
