"""The simulator: when every action starts and ends under given costs."""

from penstock.sim.simulator import simulate

__all__ = ["simulate"]
