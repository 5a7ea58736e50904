"""Schedules as values: actions, placements, orders, and their text."""

from penstock.ir.action import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Recompute,
    Recv,
    ReduceGrads,
    Reshard,
    Send,
    Unshard,
)
from penstock.ir.lazy_orders import LazyOrders
from penstock.ir.message import Message, MicrobatchId, Rank, Skip, StageId
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = [
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "LazyOrders",
    "Message",
    "MicrobatchId",
    "Overlap",
    "Placement",
    "Rank",
    "Recompute",
    "Recv",
    "ReduceGrads",
    "Reshard",
    "Schedule",
    "Send",
    "Skip",
    "StageId",
    "Unshard",
]
