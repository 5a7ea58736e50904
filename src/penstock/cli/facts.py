"""The facts of a report that commands print as JSON."""

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
