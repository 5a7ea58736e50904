"""Where to cut a model into stages."""

from penstock.partition.balance import balance
from penstock.partition.cut import Partition
from penstock.partition.memory import MemoryLimit

__all__ = ["MemoryLimit", "Partition", "balance"]
