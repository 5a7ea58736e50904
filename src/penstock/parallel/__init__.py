"""From a model to a pipeline that trains it, in one call."""

from penstock.parallel.grad_scaler import GradScaler
from penstock.parallel.memory_snapshots import Snapshots
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.parallelizing import parallelize
from penstock.parallel.pretrained import Pretrained, load_pretrained
from penstock.parallel.replica_grads import average_grads
from penstock.parallel.training_state import Saving

__all__ = [
    "GradScaler",
    "ParallelModel",
    "Pretrained",
    "Saving",
    "Snapshots",
    "average_grads",
    "load_pretrained",
    "parallelize",
]
