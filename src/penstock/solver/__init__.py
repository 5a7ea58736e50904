"""The search for a schedule for given costs, and bounds that no schedule can beat."""

from penstock.solver.advice import Advice, Help
from penstock.solver.bounds import lower_bound
from penstock.solver.problem import Problem
from penstock.solver.search_result import SearchResult, Tried
from penstock.solver.searching import search

__all__ = ["Advice", "Help", "Problem", "SearchResult", "Tried", "lower_bound", "search"]
