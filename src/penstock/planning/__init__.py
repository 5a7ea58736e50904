"""The cut, the number of microbatches and the schedule, chosen together before a run."""

from penstock.planning.plan_table import LeftOut, Plan, PlanRow
from penstock.planning.planner import plan

__all__ = ["LeftOut", "Plan", "PlanRow", "plan"]
