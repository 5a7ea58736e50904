"""The simulator: when everything happens, and how much memory it takes."""

from penstock.sim.engine import Timeline
from penstock.sim.memory import MemoryPoint
from penstock.sim.recording import RecordedStep, Recording
from penstock.sim.report import Idle, RankReport, Report, TimedAction
from penstock.sim.simulate import simulate

__all__ = [
    "Idle",
    "MemoryPoint",
    "RankReport",
    "RecordedStep",
    "Recording",
    "Report",
    "TimedAction",
    "Timeline",
    "simulate",
]
