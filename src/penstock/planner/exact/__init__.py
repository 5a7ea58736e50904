"""The exact solver, for small problems; needs OR-tools: `pip install 'penstock[exact]'`."""

from penstock.planner.exact.incumbent import ExactProgress
from penstock.planner.exact.solve import ExactResult, print_progress, solve

__all__ = ["ExactProgress", "ExactResult", "print_progress", "solve"]
