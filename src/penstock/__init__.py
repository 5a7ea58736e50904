"""Pipeline-parallel training for PyTorch.

Names that need torch load when they are first used, so `import penstock` is quick without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.errors import BackwardError, PipelineError

if TYPE_CHECKING:
    from penstock.backward import ForwardPass as ForwardPass
    from penstock.backward import PendingWeights as PendingWeights
    from penstock.backward import SplitEngine as SplitEngine
    from penstock.backward import stage_backward as stage_backward
    from penstock.backward import stage_backward_input as stage_backward_input
    from penstock.backward import stage_backward_weight as stage_backward_weight

__version__ = "0.1.0"

# Each name that needs torch, and the module that defines it.
# The imports above repeat it for type checkers; a test compares the two.
_LAZY_NAMES = {
    "ForwardPass": "penstock.backward",
    "PendingWeights": "penstock.backward",
    "SplitEngine": "penstock.backward",
    "stage_backward": "penstock.backward",
    "stage_backward_input": "penstock.backward",
    "stage_backward_weight": "penstock.backward",
}

__all__ = ["BackwardError", "PipelineError", "__version__", *_LAZY_NAMES]


if not TYPE_CHECKING:  # A type checker that saw this would accept every name.

    def __getattr__(name: str) -> object:
        if name not in _LAZY_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_LAZY_NAMES[name]), name)
        globals()[name] = value  # The next use finds it without coming here.
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
