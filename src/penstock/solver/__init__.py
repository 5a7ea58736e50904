"""The schedule made for a model: search, and what no schedule can be faster than."""

from penstock.solver.bounds import lower_bound
from penstock.solver.problem import Problem
from penstock.solver.search_result import SearchResult, Tried
from penstock.solver.searching import search

__all__ = ["Problem", "SearchResult", "Tried", "lower_bound", "search"]
