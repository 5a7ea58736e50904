"""The costs of the stages that a model was cut into, counted from shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from penstock.cutting.cut_model import CutModel
from penstock.cutting.loss_costs import Loss, add_loss
from penstock.cutting.own_backwards import ONE_AT_A_TIME
from penstock.cutting.shape_counts import LayerCost, counted, counting_saved
from penstock.ir import StageId
from penstock.torch_private import FakeTensorMode, pytree


def count_stages(
    pieces: CutModel,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any],
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
) -> list[LayerCost]:
    """Count the costs of the stages of a cut model; it may be on the meta device.

    With `loss_fn`, the loss counts with the last stage; `target` is that of one microbatch. Tied
    parameters count in each stage that has them. What cannot be run without values raises an error
    of torch's.
    """
    loss = Loss.of(loss_fn, target)
    costs: list[LayerCost] = []
    with (
        ONE_AT_A_TIME,
        FakeTensorMode(allow_non_fake_inputs=True),
        FlopCounterMode(display=False) as operations,
        counting_saved() as saved,
    ):
        args: Any = pytree.tree_map_only(Tensor, _fake, mb_args)
        kwargs: Any = pytree.tree_map_only(Tensor, _fake, mb_kwargs)

        def run(stage: StageId, module: nn.Module, values: tuple[Any, ...]) -> Any:
            own = {}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                own[name] = _fake(tensor)
                saved.leave_out(own[name])
            before = operations.get_total_flops(), saved.num_bytes
            outputs = functional_call(module, own, values, kwargs)
            costs.append(
                counted(
                    f"stage {stage}",
                    operations.get_total_flops() - before[0],
                    saved.num_bytes - before[1],
                    sum(parameter.nbytes for parameter in module.parameters()),
                )
            )
            return outputs

        outputs = pieces.run_stages(run, args)
    return add_loss(costs, None if loss is None else loss.count(outputs))


def _fake(tensor: Tensor) -> Tensor:
    """Return a tensor of the current mode, without values, that is like one on the host."""
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
    )
