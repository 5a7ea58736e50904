"""Every exception that Penstock raises on its own account.

Each is also the built-in exception that fits, so `except RuntimeError` keeps working.

    PipelineError
    └── BackwardError    (RuntimeError)   the split backward cannot run on what it was given
"""


class PipelineError(Exception):
    """The base of every exception in Penstock; catch it to catch them all."""


class BackwardError(PipelineError, RuntimeError):
    """The split backward cannot run on the outputs, gradients or weights it was given."""
