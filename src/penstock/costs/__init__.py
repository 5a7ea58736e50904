"""The costs of stages: times, memory, and messages between them."""

from penstock.costs.cost_table import CostTable, EdgeCost, StageCost
from penstock.costs.document_packing import pack
from penstock.costs.footprint import Footprint
from penstock.costs.lengths import Work
from penstock.costs.memory_levels import Level

__all__ = ["CostTable", "EdgeCost", "Footprint", "Level", "StageCost", "Work", "pack"]
