"""What commands say of a report to other programs."""

from penstock.timeline import Report


def facts_of(report: Report) -> dict[str, float]:
    """Its times, bubbles and memory, under the names that they have in Python."""
    return {
        "makespan": report.makespan,
        "span": report.span,
        "bubble_by_makespan": report.bubble_by_makespan,
        "bubble_by_span": report.bubble_by_span,
        "peak_memory": report.peak_memory,
    }
