"""Schedules for one question side by side, and the costs as people give them."""

from penstock.comparison.best import find_best
from penstock.comparison.comparison import SEARCHED, Comparison, Row
from penstock.comparison.question import Question
from penstock.costs.given_costs import GivenCosts, ShareCosts, TableCosts

__all__ = [
    "SEARCHED",
    "Comparison",
    "GivenCosts",
    "Question",
    "Row",
    "ShareCosts",
    "TableCosts",
    "find_best",
]
