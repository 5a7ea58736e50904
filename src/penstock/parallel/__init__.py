"""From a model to a pipeline that trains it, in one call."""

from penstock.parallel.grad_scaler import GradScaler
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.parallelizing import parallelize
from penstock.parallel.pretrained import Pretrained, load_pretrained
from penstock.parallel.training_state import Saving

__all__ = [
    "GradScaler",
    "ParallelModel",
    "Pretrained",
    "Saving",
    "load_pretrained",
    "parallelize",
]
