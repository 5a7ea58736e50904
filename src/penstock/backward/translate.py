"""Autograd's complaints about what cannot be run backward, in our words."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.backward.structure import describe
from penstock.errors import BackwardError

_RELEASED = "Trying to backward through the graph a second time"
_REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible"


@contextmanager
def translated(outputs: Iterable[Tensor]) -> Iterator[None]:
    """Raise ours for autograd's. `outputs`: the stage outputs, or tensors of their shapes."""
    try:
        yield
    except RuntimeError as exc:
        text = str(exc)
        if text.startswith(_RELEASED):
            shapes = ", ".join(describe(output) for output in outputs)
            raise BackwardError(
                f"the graph of the stage outputs ({shapes}) has been released by an earlier "
                "backward. A backward needs a forward of its own: run the stage's forward "
                "again and, if microbatches share a computed tensor, compute it in each forward."
            ) from exc
        if text.startswith(_REENTRANT):
            raise BackwardError(
                "the stage uses torch.utils.checkpoint with use_reentrant=True, whose backward "
                "cannot be split. Pass use_reentrant=False."
            ) from exc
        raise
