"""Schedules for one question side by side, and the costs as people give them."""

from penstock.comparison.best import find_best
from penstock.comparison.comparison import SEARCHED, Comparison, Row
from penstock.comparison.costs import Costs, ShareCosts, StageCosts
from penstock.comparison.question import Question

__all__ = [
    "SEARCHED",
    "Comparison",
    "Costs",
    "Question",
    "Row",
    "ShareCosts",
    "StageCosts",
    "find_best",
]
