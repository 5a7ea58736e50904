"""Measures what stages cost, where they run."""

from penstock.profile.costs import measure_costs

__all__ = ["measure_costs"]
