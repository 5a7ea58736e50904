"""The warning that a compiled part of a stage leaves nothing to its weight backward."""

import warnings

from torch import nn

from penstock.backward import PendingBackward
from penstock.backward.structure import tensors_in
from penstock.backward.wrappers import is_compiled, is_compiled_graph


def warn_of_compiled_weights(place: str, stage: nn.Module, pending: PendingBackward) -> None:
    """Say that weights inside compiled modules get their gradients early, if there are any."""
    if pending.has_split_regions or not is_compiled_graph(tensors_in(pending.outputs)):
        return
    for name, module in stage.named_modules():
        if is_compiled(module) and any(w.requires_grad for w in module.parameters()):
            warnings.warn(
                f"{place}: {f'its module {name!r}' if name else 'it'} was compiled by "
                "torch.compile, whose backward cannot be split. The gradients of its weights "
                "are computed in the input backward, so bubbles stay idle. Use "
                "penstock.compile in place of torch.compile.",
                stacklevel=3,
            )
            return
