"""What the steps of drop-in classes pass on to stages."""

import torch
from torch import Tensor, nn

import penstock
from penstock import compat
from stage_training import assert_close


class TakesAll(nn.Module):
    """A stage with keyword arguments that have the names of options of `Pipeline.step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        *,
        work: Tensor,
        finalize: Tensor,
        grad_scale: Tensor,
        over_replicas: Tensor,
    ) -> Tensor:
        y: Tensor = self.layer(x) * work * finalize * grad_scale * over_replicas
        return y


def test_stages_may_take_arguments_of_any_name() -> None:
    """`work`, `finalize` and `grad_scale` were once taken for options of the step."""
    module, (x, target) = TakesAll().double(), torch.randn(2, 8, 4).double()
    names = ("work", "finalize", "grad_scale", "over_replicas")
    given = {name: torch.rand(8, 1).double() for name in names}

    def main(group: penstock.LocalGroup) -> list[Tensor]:
        stage = penstock.PipelineStage(module, 0, 1, "cpu", group=group)
        schedule = compat.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        return [schedule.step(x, target=target, **given), schedule.eval(x, target=target, **given)]

    (found,) = penstock.local_ranks(1, main)
    for outputs in found:
        assert_close("outputs", module(x, **given), outputs)
