"""What a step leaves behind: gradients and what it returned, and nothing that adds up."""

from typing import Any

from torch import nn

from fuzzing import rotated
from local_steps import FOUR_STAGES, NUM_STAGES, mean_square, randn, run_locally
from penstock import Pipeline, Schedule, schedules
from staged_models import MODELS
from tensor_counts import growth_of, live_tensors, weights_and_grads

# What goes between the stages in the long runs: one microbatch of it is 64 kB, and one of them
# kept in each of the 120 steps that are measured would be 8 MB.
ROWS, COLUMNS = 512, 64
ROOM_BYTES = 4_000_000


@rotated(kind=["step", "eval"], model_name=["many", "mlp"], schedule=FOUR_STAGES)
def test_after_a_step_only_weights_gradients_inputs_and_outputs_are_alive(
    kind: str, model_name: str, schedule: Schedule
) -> None:
    model = MODELS[model_name]
    modules = [model.stage(index, NUM_STAGES) for index in range(NUM_STAGES)]
    batch = model.batch(8, 0)
    before = live_tensors()

    def main(pipeline: Pipeline) -> tuple[Pipeline, Any]:
        for _ in range(3):
            outputs = getattr(pipeline, kind)(*batch.args, target=batch.target, **batch.kwargs)
        return pipeline, outputs  # The pipeline has to be alive when the tensors are counted.

    results = run_locally(modules, schedule, main, loss_fn=model.loss_fn("mean"))
    (outputs,) = (outputs for _, outputs in results if outputs is not None)
    returned = outputs if isinstance(outputs, tuple) else (outputs,)
    known = [*before, *weights_and_grads(modules), *returned]
    assert [] == [tuple(x.shape) for x in live_tensors(but=known)]


@rotated(name=["1F1B", "ZB-V", "DualPipeV"], num_ranks=[2, 1])
def test_many_steps_do_not_grow(name: str, num_ranks: int) -> None:
    schedule = schedules.get(name)(num_ranks=num_ranks, num_microbatches=4)
    modules = [nn.Linear(COLUMNS, COLUMNS).double() for _ in range(schedule.num_stages)]
    x, target = randn(ROWS, COLUMNS), randn(ROWS, COLUMNS)

    def main(pipeline: Pipeline) -> tuple[int, int]:
        # Ranks take turns in the same way each time, so each counts at the same point of a step.
        return growth_of(lambda: pipeline.step(x, target=target))

    for tensors, memory in run_locally(modules, schedule, main, loss_fn=mean_square):
        assert 0 == tensors
        assert memory < ROOM_BYTES
