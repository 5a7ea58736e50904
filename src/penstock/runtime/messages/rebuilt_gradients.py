"""Gradients that have arrived from another rank, in the form of the outputs they are for."""

from torch import Tensor

from penstock.ir import Message
from penstock.runtime.messages.forms import Form
from penstock.stage import PipelineStage


def rebuild_gradients(
    stage: PipelineStage,
    message: Message,
    form: Form,
    tensors: list[Tensor],
    outputs: list[Tensor],
) -> list[Tensor | None]:
    """Return the gradients that a message of any form holds for outputs that need one."""
    arriving = iter(tensors)
    return [
        None
        if like is None
        else stage.rebuild(next(arriving), like.spread, message.mb, gradient_of=output)
        for like, output in zip(form.leaves, outputs, strict=True)
    ]
