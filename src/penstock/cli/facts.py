"""The facts that commands print as JSON."""

from typing import Any

from penstock.solver.advice import Advice
from penstock.timeline import Report


def facts_of(report: Report) -> dict[str, float]:
    """Return the times, bubbles and memory of a report, under their names in Python."""
    return {
        "makespan": report.makespan,
        "span": report.span,
        "bubble_by_makespan": report.bubble_by_makespan,
        "bubble_by_span": report.bubble_by_span,
        "peak_memory": report.peak_memory,
    }


def advice_facts(advice: Advice) -> dict[str, Any]:
    """Return what limits a step and what would help, under their names in Python."""
    helps = [{"what": help.what, "gain": help.gain} for help in advice.helps]
    return {"limit": advice.limit, "helps": helps}
