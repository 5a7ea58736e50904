"""The exact solver for small problems; it needs OR-tools: `pip install 'penstock[exact]'`."""

from penstock.solver.exact.incumbent import ExactProgress
from penstock.solver.exact.solution import ExactResult, print_progress, solve

__all__ = ["ExactProgress", "ExactResult", "print_progress", "solve"]
