"""Translation of autograd's errors about graphs that cannot be run backward."""

from collections.abc import Iterable

from torch import Tensor

from penstock.backward.structure import describe
from penstock.errors import BackwardError

_RELEASED = "Trying to backward through the graph a second time"
_HOOKED_LEAF = "A leaf node was passed to _will_engine_execute_node"
_REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible"


class Translated:
    """A context that replaces autograd's errors by ours.

    `outputs`: the stage outputs, or tensors like them.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        self._outputs = outputs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            self.translate(error)

    def translate(self, error: RuntimeError) -> None:
        """Raise our error in place of one of autograd's; return if there is none."""
        if (ours := self._translate(str(error))) is not None:
            raise ours from error

    def _translate(self, text: str) -> BackwardError | None:
        if text.startswith(_RELEASED):
            shapes = ", ".join(describe(output) for output in self._outputs)
            return BackwardError(
                f"the graph of the stage outputs ({shapes}) has been released by an earlier "
                "backward. Each backward needs its own forward: run the stage's forward "
                "again and, if microbatches share a computed tensor, compute it in each forward."
            )
        if text.startswith(_HOOKED_LEAF):
            return BackwardError(
                "a multi-grad hook is on a leaf whose gradient the input backward computes, which "
                "torch does not support. FlopCounterMode and CommDebugMode put such hooks on all "
                "that modules are called with, and CommDebugMode leaves them there. Make a new "
                "leaf x and call the module with x.view_as(x), or use a SplitEngine, which does so."
            )
        if text.startswith(_REENTRANT):
            return BackwardError(
                "the stage uses torch.utils.checkpoint with use_reentrant=True, whose backward "
                "cannot be split. Pass use_reentrant=False."
            )
        return None
