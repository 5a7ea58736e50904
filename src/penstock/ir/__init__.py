"""Schedules as values: actions, placements, orders, and their text."""

from penstock.ir.action import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MicrobatchId,
    Overlap,
    Rank,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    StageId,
)
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = [
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "MicrobatchId",
    "Overlap",
    "Placement",
    "Rank",
    "RecvActivation",
    "RecvGradient",
    "Schedule",
    "SendActivation",
    "SendGradient",
    "StageId",
]
