"""The simulator: the start and end of every action under given costs."""

from penstock.sim.simulator import simulate

__all__ = ["simulate"]
