"""Every exception that Penstock raises on its own account.

Each is also the built-in exception that fits, so `except RuntimeError` keeps working.

    PipelineError
    ├── BackwardError    (RuntimeError)   the split backward cannot run on what it was given
    ├── CostError        (ValueError)     a cost table does not fit together, or not the schedule
    └── ScheduleError    (ValueError)     a schedule, a placement or its text is wrong
"""


class PipelineError(Exception):
    """The base of every exception in Penstock; catch it to catch them all."""


class BackwardError(PipelineError, RuntimeError):
    """The split backward cannot run on the outputs, gradients or weights it was given."""


class CostError(PipelineError, ValueError):
    """The costs do not fit together, or do not fit the schedule."""


class ScheduleError(PipelineError, ValueError):
    """A schedule, a placement or its text is wrong, or cannot be made for what was asked."""
