"""The schedule made for a model: search, and what no schedule can be faster than."""

from penstock.planner.bounds import lower_bound
from penstock.planner.problem import Problem
from penstock.planner.result import SearchResult, Tried
from penstock.planner.search import search

__all__ = ["Problem", "SearchResult", "Tried", "lower_bound", "search"]
