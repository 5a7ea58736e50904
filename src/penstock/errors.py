"""Every exception that Penstock raises on its own account.

Each is also the built-in exception that fits, so `except RuntimeError` keeps working.

    PipelineError
    ├── AgreementError   (RuntimeError)   the ranks were not given the same pipeline
    ├── AssignmentError  (AttributeError) an attribute was set that nothing acts on
    ├── BackwardError    (RuntimeError)   the split backward cannot run on what it was given
    ├── CommError        (RuntimeError)   another rank failed, or cannot be reached
    │   └── DeadlineError    (TimeoutError)   a message did not come in time
    ├── CostError        (ValueError)     a cost table does not fit together, or not the schedule
    ├── DrawError        (ValueError)     a timeline cannot be drawn as asked
    ├── MicrobatchError  (ValueError)     a value cannot be cut into microbatches, or joined
    ├── OptionError      (ValueError)     an option of the command line cannot be used
    │   └── FieldError       (ValueError)     fields of the studio cannot be used
    ├── PartitionError   (ValueError)     a model cannot be cut into stages as asked
    ├── PipeliningShapeError (RuntimeError) a tensor between stages is not what was expected
    ├── RecordError      (ValueError)     nothing was recorded, or a recording cannot be read
    ├── ScheduleError    (ValueError)     a schedule, a placement or its text is wrong
    ├── StageError       (ValueError)     stages do not fit the schedule, the group or their inputs
    ├── TorchError       (ImportError)    this torch lacks a part that Penstock needs
    └── TraceError       (RuntimeError)   a model's forward cannot be traced
"""

from collections.abc import Mapping


class PipelineError(Exception):
    """The base of every exception in Penstock; catch it to catch them all."""


class AgreementError(PipelineError, RuntimeError):
    """The ranks of one pipeline were given different schedules, stages or loss functions."""


class AssignmentError(PipelineError, AttributeError):
    """An attribute was set to no effect: it is not there, or was read once for all."""


class BackwardError(PipelineError, RuntimeError):
    """The split backward cannot run on the outputs, gradients or weights it was given."""


class CommError(PipelineError, RuntimeError):
    """Another rank failed, or cannot be reached; the message says where it began."""


class DeadlineError(CommError, TimeoutError):
    """A message did not come in time; the message says who waited for what from whom."""


class CostError(PipelineError, ValueError):
    """The costs do not fit together, or do not fit the schedule."""


class DrawError(PipelineError, ValueError):
    """A timeline cannot be drawn as asked."""


class MicrobatchError(PipelineError, ValueError):
    """A value cannot be cut into microbatches, or what came out of them cannot be joined."""


class OptionError(PipelineError, ValueError):
    """An option of a command, or of the trainer behind it, cannot be used, or a file it names."""


class FieldError(OptionError):
    """Fields of the studio hold what cannot be used: `problems` has a message for each."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = dict(problems)


class PartitionError(PipelineError, ValueError):
    """A model cannot be cut into stages as asked."""


class PipeliningShapeError(PipelineError, RuntimeError):
    """A tensor between stages has not the shape, the dtype or the place that was expected."""


PipeliningMetadataError = PipeliningShapeError
"""The name that torch.distributed.pipelining gives it."""


class RecordError(PipelineError, ValueError):
    """Nothing was recorded, or a recording cannot be read."""


class ScheduleError(PipelineError, ValueError):
    """A schedule, a placement or its text is wrong, or cannot be made for what was asked."""


class StageError(PipelineError, ValueError):
    """Stages do not fit the schedule or the group, or a step was not given what it needs."""


class TorchError(PipelineError, ImportError):
    """This version of torch lacks private parts that Penstock needs; the message names them."""


class TraceError(PipelineError, RuntimeError):
    """A model's forward cannot be traced; the message says which line of it."""
