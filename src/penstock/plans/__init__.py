"""The cut, the number of microbatches and the schedule, chosen together before a run."""

from penstock.plans.front import plan
from penstock.plans.result import LeftOut, Plan, PlanRow

__all__ = ["LeftOut", "Plan", "PlanRow", "plan"]
