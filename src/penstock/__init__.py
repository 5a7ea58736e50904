"""Pipeline-parallel training for PyTorch.

Names load when they are first used, so `import penstock` is quick, and stays so without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.errors import BackwardError, CostError, PipelineError, ScheduleError

if TYPE_CHECKING:
    from penstock import ir as ir
    from penstock import passes as passes
    from penstock import schedules as schedules
    from penstock import sim as sim
    from penstock.backward import ForwardPass as ForwardPass
    from penstock.backward import PendingWeights as PendingWeights
    from penstock.backward import SplitEngine as SplitEngine
    from penstock.backward import stage_backward as stage_backward
    from penstock.backward import stage_backward_input as stage_backward_input
    from penstock.backward import stage_backward_weight as stage_backward_weight
    from penstock.ir import Placement as Placement
    from penstock.ir import Schedule as Schedule
    from penstock.sim import CostTable as CostTable
    from penstock.sim import simulate as simulate

__version__ = "0.1.0"

# Each name that loads when it is used, and the module that has it.
# The imports above repeat it for type checkers; a test compares the two.
_LAZY_NAMES = {
    "CostTable": "penstock.sim",
    "ForwardPass": "penstock.backward",
    "PendingWeights": "penstock.backward",
    "Placement": "penstock.ir",
    "Schedule": "penstock.ir",
    "SplitEngine": "penstock.backward",
    "ir": "penstock",
    "passes": "penstock",
    "schedules": "penstock",
    "sim": "penstock",
    "simulate": "penstock.sim",
    "stage_backward": "penstock.backward",
    "stage_backward_input": "penstock.backward",
    "stage_backward_weight": "penstock.backward",
}

__all__ = [
    "BackwardError",
    "CostError",
    "PipelineError",
    "ScheduleError",
    "__version__",
    *_LAZY_NAMES,
]


if not TYPE_CHECKING:  # A type checker that saw this would accept every name.

    def __getattr__(name: str) -> object:
        if name not in _LAZY_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _LAZY_NAMES[name]
        if module == __name__:
            return import_module(f"{__name__}.{name}")
        value = getattr(import_module(module), name)
        globals()[name] = value  # The next use finds it without coming here.
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_NAMES})
