"""Prints what was measured on two ranks, as the tables of the READMEs."""

from collections.abc import Callable, Sequence
from typing import Any

from contenders import PENSTOCK, PENSTOCK_GLOO, SCHEDULES, TORCH, TORCH_CLASSES

Quartiles = tuple[float, float, float]
"""Lower quartile, median, upper quartile."""

LIBRARIES = (TORCH, PENSTOCK_GLOO, PENSTOCK)
COLUMNS = ("torch over gloo", "ours over gloo", "ours over shared memory")
OURS = (PENSTOCK_GLOO, PENSTOCK)
README_WIDTH = 256
HOST_TIME_LIMIT = 0.5  # Ours ÷ torch's, per action.


def print_tables(record: dict[str, Any]) -> None:
    """Print every width, and then the short table of the project's README."""
    for size in record["widths"]:
        print(f"\nWidth {size['width']}, {size['rounds']} rounds:\n")
        print_table(COLUMNS, ratio_columns("torch ÷ "), step_rows(size))
        if "host_s_per_action" in size:
            print(f"\nHost time per action at width {size['width']}, in µs:\n")
            print_table(
                COLUMNS, ratio_columns("", f" ÷ torch (≤ {HOST_TIME_LIMIT})"), host_rows(size)
            )
        if size["width"] == README_WIDTH:
            print(f"\nFor README.md, of {size['rounds']} rounds:\n")
            print_readme_table(size)


def ratio_columns(before: str, after: str = "") -> list[str]:
    return [f"{before}ours, {link}{after}" for link in ("both gloo", "as they are")]


def print_table(columns: Sequence[str], ratios: Sequence[str], rows: list[list[str]]) -> None:
    print("|", " | ".join(("schedule", *columns, *ratios)), "|")
    print("|---|" + "--:|" * (len(columns) + len(ratios)))
    for row in rows:
        print("|", " | ".join(row), "|")


def step_rows(size: dict[str, Any]) -> list[list[str]]:
    found = size["step_s"]
    rows = make_rows(found, SCHEDULES, lambda values: spread(values, 1e-3), ratio)
    rows.append(best_row(found, lambda values: spread(values, 1e-3), ratio))
    rows[-1][-1] += f" (≥ {size['goal']:.2f})"
    return rows


def print_readme_table(size: dict[str, Any]) -> None:
    """Print only ratios, of the schedules that both libraries have."""
    over = size["step_s"]["torch_over"]
    names = [name for name in TORCH_CLASSES if name in over[PENSTOCK]]
    print("| torch ÷ Penstock |", " | ".join(names), "|")
    print("|---|" + "--:|" * len(names))
    links = ("both over gloo", "Penstock over shared memory, its default")
    for link, library in zip(links, OURS, strict=True):
        print(f"| {link} |", " | ".join(short_ratio(over[library][name]) for name in names), "|")


def host_rows(size: dict[str, Any]) -> list[list[str]]:
    """Only schedules that both libraries have; what is divided is ours."""

    def inverse(values: Quartiles) -> str:
        low, middle, high = values
        return ratio((1 / high, 1 / middle, 1 / low))

    found = size["host_s_per_action"]
    return make_rows(found, TORCH_CLASSES, lambda values: spread(values, 1e-6), inverse)


Write = Callable[[Quartiles], str]


def make_rows(
    found: dict[str, Any], names: Sequence[str], write: Write, write_ratio: Write
) -> list[list[str]]:
    """Write a row for each schedule that took part: its three times, and its two ratios."""
    rows = []
    for name in names:
        times = [found["quartiles"].get(f"{library} {name}") for library in LIBRARIES]
        ratios = [found["torch_over"][library].get(name) for library in OURS]
        if any(times):
            cells = [write(value) if value else "-" for value in times]
            rows.append([name, *cells, *(write_ratio(value) if value else "-" for value in ratios)])
    return rows


def best_row(found: dict[str, Any], write: Write, write_ratio: Write) -> list[str]:
    cells = []
    for library in LIBRARIES:
        best = found["best"].get(library)
        cells.append(f"{write(found['quartiles'][f'{library} {best}'])} {best}" if best else "-")
    ratios = [found["torch_over"][library].get("best") for library in OURS]
    return ["best of each", *cells, *(write_ratio(value) if value else "-" for value in ratios)]


def spread(values: Quartiles, unit: float) -> str:
    low, middle, high = (value / unit for value in values)
    digits = 1 if middle < 1000 else 0
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def is_within_spread(values: Quartiles) -> bool:
    """Return whether either side was the faster one in a quarter of the rounds or more."""
    return values[0] <= 1 <= values[2]


def ratio(values: Quartiles) -> str:
    low, _, high = values
    return f"{short_ratio(values)} [{low:.2f}-{high:.2f}]"


def short_ratio(values: Quartiles) -> str:
    return f"{'≈ ' if is_within_spread(values) else ''}{values[1]:.2f}"
