"""Timelines, simulated or measured: their reports, and recordings of real runs."""

from penstock.timeline.bubble_report import Idle, RankReport, Report, TimedAction
from penstock.timeline.memory_over_time import MemoryPoint
from penstock.timeline.recording import RecordedStep, Recording
from penstock.timeline.timeline import Timeline

__all__ = [
    "Idle",
    "MemoryPoint",
    "RankReport",
    "RecordedStep",
    "Recording",
    "Report",
    "TimedAction",
    "Timeline",
]
