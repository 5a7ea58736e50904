"""A step of sharded stages takes no more collectives than the classes of torch do."""

import pytest

from fuzzing import rotated
from mesh_training import Case, run_on_rank
from torch_in_meshes import TORCH_CLASSES, run_torch_on_rank
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist


@rotated(
    schedule=list(TORCH_CLASSES),
    wrapping=["FSDP2, True", "FSDP2", "FSDP2, False", "FSDP2 on the stage"],
)
def test_collectives_of_a_step_are_at_most_those_of_torch(
    schedule: str, wrapping: str, fresh_pool: WorkerPool
) -> None:
    case = Case("plain", wrapping, schedule)
    ours = fresh_pool.run(4, run_on_rank, case)
    theirs = fresh_pool.run(4, run_torch_on_rank, case)
    is_torch_right = max(each.difference for each in theirs) < 1e-12
    for own, other in zip(ours, theirs, strict=True):
        assert own.difference < 1e-12
        assert own.gathers <= other.gathers
        assert own.num_groups == own.reductions
        # Otherwise torch has left out reductions, and with them gradients.
        assert own.reductions <= other.reductions or not is_torch_right
