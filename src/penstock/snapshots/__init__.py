"""Snapshots in memory that outlives a rank, so that a killed one costs no file system.

`penstock.parallelize(...)` has them as `pipe.snapshots(optimizer)`. For stages of your own, keep
their tensors with `KeptState`.
"""

from penstock.snapshots.kept_state import KeptState, Part, Snapshot

__all__ = ["KeptState", "Part", "Snapshot"]
