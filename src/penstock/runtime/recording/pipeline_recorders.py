"""The recorders of a pipeline: its own, and those of the blocks in which it steps."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import RecordError
from penstock.runtime.recording.recorded_block import active_run
from penstock.runtime.recording.recorder import Recorder
from penstock.timeline import Recording


@dataclass(frozen=True, slots=True)
class PipelineRecorders:
    """The recorders that watch the steps of a pipeline."""

    active: list[Recorder]
    """The pipeline's own recorder first, if it has one; then those of recorded blocks."""
    has_own: bool

    @classmethod
    def of(cls, *, record: bool, record_memory: bool) -> "PipelineRecorders":
        """Make the pipeline's own recorder, if it is to record."""
        has_own = record or record_memory
        return cls([Recorder(counts_memory=record_memory)] if has_own else [], has_own)

    @property
    def own(self) -> Recorder:
        """The pipeline's own recorder; an error if it has none."""
        if not self.has_own:
            raise RecordError(
                "this pipeline does not record its steps. Make it with record=True, or run its "
                "steps in a `with penstock.record() as run:` block."
            )
        return self.active[0]

    def join_block(self, gather: Callable[[Recorder], Recording]) -> None:
        """Let the recorded block that this step is in, if any, record it."""
        if (run := active_run()) is not None:
            run.watch(self.active, gather)


def check_has_steps(recorder: Recorder) -> None:
    """Raise an error if nothing has been recorded yet."""
    if recorder.is_empty:
        raise RecordError(
            "no step has been recorded yet. Run one before asking for the recording, or two if "
            'the first counts memory, as it does with record_memory and the schedule "auto".'
        )
