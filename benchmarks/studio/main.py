"""How soon does the picture of `penstock studio` follow a change?

A headless browser types into a field of the real page and notes when the new picture is shown: at
rest, when all that was asked before has been answered, and in the midst, when the table of all
schedules and a search are still under way.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from selenium.webdriver import Chrome

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "browser"))
from chromium import chromium, open_page, wait_until
from processes import environment

from studio_process import studio

SIZES = ((4, 8), (32, 128))
LIMIT_S = 1.0
CHANGE = """
const [text, done] = arguments;
const before = document.body.dataset.drawn;
const field = document.getElementById("forward");
const began = performance.now();
field.value = text;
field.dispatchEvent(new Event("input", { bubbles: true }));
const look = () => document.body.dataset.drawn === before
  ? requestAnimationFrame(look)
  : requestAnimationFrame(() => done((performance.now() - began) / 1000));
look();
"""


def measure(browser: Chrome, *, is_at_rest: bool, repeats: int) -> list[float]:
    """From the key to the frame with the new picture, including the pause that it waits."""
    times = []
    for n in range(repeats):
        if is_at_rest:
            wait_until(browser, is_ready, "all answers")
        times.append(browser.execute_async_script(CHANGE, f"{1 + (n + 1) / 10:g}"))
    wait_until(browser, is_ready, "all answers")
    return times


def is_ready(browser: Chrome) -> bool:
    return bool(browser.execute_script("return document.body.dataset.state === 'ready'"))


def run(repeats: int) -> list[dict[str, Any]]:
    figures = []
    with chromium() as browser, studio("--port", 0) as running:
        for ranks, microbatches in SIZES:
            open_page(browser, f"{running.address}?ranks={ranks}&microbatches={microbatches}")
            for is_at_rest in (True, False):
                times = measure(browser, is_at_rest=is_at_rest, repeats=repeats)
                figures.append(
                    {
                        "ranks": ranks,
                        "microbatches": microbatches,
                        "when": "at rest" if is_at_rest else "in the midst",
                        "seconds": times,
                    }
                )
    return figures


def table_of(figures: list[dict[str, Any]]) -> Table:
    table = Table(title=f"From the key to the picture, ms (≤ {LIMIT_S * 1e3:.0f})")
    for column in ("ranks", "microbatches", "when", "median", "largest"):
        table.add_column(column, justify="left" if column == "when" else "right")
    for found in figures:
        shape = str(found["ranks"]), str(found["microbatches"])
        times = found["seconds"]
        ends = (f"{value * 1e3:.0f}" for value in (statistics.median(times), max(times)))
        table.add_row(*shape, found["when"], *ends)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="changes of each case")
    parser.add_argument("--quick", action="store_true", help="five changes of each case")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    figures = run(5 if args.quick else args.repeats)
    Console(width=100, highlight=False).print(table_of(figures))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps({**environment(), "cases": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
