"""A traced pipe that torch's names make runs on processes, and gives tensors as torch's does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import compat
from pipe_models import CUT_AT, make_inputs, make_net
from stage_training import Group, rank_in
from worker_pool import WorkerPool

pytestmark = pytest.mark.dist

SIZE = 4


def step_pipe(group: Group, has_loss: bool) -> tuple[Any, list[Tensor | None]]:
    """Cut the model on this rank and run a step; return its outputs and the gradients."""
    spec = {CUT_AT: compat.SplitPoint.BEGINNING}
    pipe = compat.pipeline(make_net("object"), make_inputs(SIZE // 2), split_spec=spec)
    rank = rank_in(group)
    stage = pipe.build_stage(rank, torch.device("cpu"), group)
    schedule = compat.ScheduleGPipe(
        stage,
        2,
        loss_fn=(lambda outputs, _: outputs[0].square().mean()) if has_loss else None,
        args_chunk_spec=(compat.TensorChunkSpec(0), compat.microbatch._Replicate()),
    )
    # Without a loss, the graph would go with the outputs.
    with torch.set_grad_enabled(has_loss):
        outputs = schedule.step(*make_inputs(SIZE)) if rank == 0 else schedule.step()
    return outputs, [parameter.grad for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("has_loss", [False, True])
def test_step_of_a_model_with_its_own_outputs_gives_a_tuple(
    has_loss: bool, pool: WorkerPool
) -> None:
    (nothing, first_grads), (outputs, last_grads) = pool.run(2, step_pipe, has_loss)
    x, scale = make_inputs(SIZE)
    with torch.no_grad():  # On some processors, a larger batch rounds differently.
        parts = [make_net("object")(part, scale) for part in x.chunk(2)]
    logits, hidden = zip(*((part.logits, part.hidden) for part in parts), strict=True)
    assert nothing is None
    assert tuple is type(outputs)
    assert torch.equal(torch.cat(logits), outputs[0])
    assert torch.equal(torch.cat(hidden), outputs[1])
    assert all((grad is not None) == has_loss for grad in (*first_grads, *last_grads))
