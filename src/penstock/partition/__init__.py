"""The choice of the cuts that divide a model into stages."""

from penstock.partition.balancing import balance
from penstock.partition.layer_ranges import Partition
from penstock.partition.memory_limit import MemoryLimit

__all__ = ["MemoryLimit", "Partition", "balance"]
