"""The exceptions that Penstock raises.

Each is also the built-in exception that fits, so `except RuntimeError` keeps working.

    PipelineError
    ├── AgreementError   (RuntimeError)   the ranks were not given the same pipeline
    ├── AssignmentError  (AttributeError) an assignment would have no effect
    ├── BadValueError    (FloatingPointError) a loss or a gradient is not finite
    ├── BackwardError    (RuntimeError)   the split backward cannot run on these values
    ├── CheckpointError  (ValueError)     a training cannot be saved to a folder, or loaded from it
    ├── CommError        (RuntimeError)   another rank failed, or cannot be reached
    │   └── DeadlineError    (TimeoutError)   a message did not arrive in time
    ├── CompileError     (ValueError)     a module cannot be compiled so that it can be split
    ├── CostError        (ValueError)     costs are inconsistent, or do not fit the schedule
    ├── DrawError        (ValueError)     a timeline cannot be drawn as asked
    ├── GradientError    (RuntimeError)   gradients cannot be clipped as asked
    ├── InstallError     (ImportError)    torch's pipelining cannot be replaced in this process
    ├── MicrobatchError  (ValueError)     a value cannot be cut into microbatches, or joined
    ├── OptionError      (ValueError)     an option of the command line cannot be used
    │   └── FieldError       (ValueError)     fields of the studio cannot be used
    ├── PartitionError   (ValueError)     a model cannot be cut into stages as asked
    ├── PipeliningShapeError (RuntimeError) a message between stages does not have the expected form
    ├── PretrainedError  (ValueError)     a folder of weights cannot be read or written as asked
    ├── RecordError      (ValueError)     nothing was recorded, or a recording cannot be read
    ├── ScheduleError    (ValueError)     a schedule, a placement or its text is wrong
    ├── StageError       (ValueError)     stages do not fit the schedule, the group or their inputs
    │   └── StepError        (RuntimeError)   a step cannot run in the way it was called
    ├── TorchError       (ImportError)    this version of torch lacks a part that Penstock needs
    └── TraceError       (RuntimeError)   a model's forward cannot be traced
"""

from collections.abc import Mapping


class PipelineError(Exception):
    """The base of every exception in Penstock; catch it to catch them all."""


class AgreementError(PipelineError, RuntimeError):
    """The ranks of one pipeline were given different schedules, stages or loss functions."""


class AssignmentError(PipelineError, AttributeError):
    """An assignment would have no effect: there is no such attribute, or it was read only once."""


class BackwardError(PipelineError, RuntimeError):
    """The split backward cannot run on the outputs, gradients or weights it was given."""


class BadValueError(PipelineError, FloatingPointError):
    """A loss or a gradient is not finite; the text says where that began."""


class CheckpointError(PipelineError, ValueError):
    """The state of a training cannot be saved to a folder, or loaded from it."""


class CommError(PipelineError, RuntimeError):
    """Another rank failed, or cannot be reached; the text says where the failure began."""


class DeadlineError(CommError, TimeoutError):
    """A message did not arrive in time; the text says which rank waited, for what and from whom."""


class CompileError(PipelineError, ValueError):
    """A module cannot be compiled as asked, so that its backward can be split."""


class CostError(PipelineError, ValueError):
    """The costs are inconsistent, or do not fit the schedule."""


class DrawError(PipelineError, ValueError):
    """A timeline cannot be drawn as asked."""


class GradientError(PipelineError, RuntimeError):
    """Gradients cannot be clipped or averaged as asked, or their norm is not finite."""


class InstallError(PipelineError, ImportError):
    """torch.distributed.pipelining cannot be replaced in this process any more."""


class MicrobatchError(PipelineError, ValueError):
    """A value cannot be cut into microbatches, or their outputs cannot be joined."""


class OptionError(PipelineError, ValueError):
    """An option of a command or of the trainer, or a file that it names, cannot be used."""


class FieldError(OptionError):
    """Fields of the studio cannot be used; `problems` has a message for each."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = dict(problems)


class PartitionError(PipelineError, ValueError):
    """A model cannot be cut into stages as asked."""


class PipeliningShapeError(PipelineError, RuntimeError):
    """A message between stages does not have the expected form, such as its shapes or dtypes."""


PipeliningMetadataError = PipeliningShapeError
"""The name of `PipeliningShapeError` in torch.distributed.pipelining."""


class PretrainedError(PipelineError, ValueError):
    """A folder of weights, or an adapter, cannot be read or written as asked."""


class RecordError(PipelineError, ValueError):
    """Nothing was recorded, or a recording cannot be read."""


class ScheduleError(PipelineError, ValueError):
    """A schedule, a placement or its text is wrong, or cannot be made as asked."""


class StageError(PipelineError, ValueError):
    """Stages do not fit the schedule or the group, or a step lacks a value that it needs."""


class StepError(StageError, RuntimeError):
    """A step cannot run in the way it was called; torch raises a RuntimeError there."""


class TorchError(PipelineError, ImportError):
    """This version of torch lacks private parts that Penstock needs; the text names them."""


class TraceError(PipelineError, RuntimeError):
    """A model's forward cannot be traced; the text names the line."""
