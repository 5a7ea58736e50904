"""The block `with penstock.record() as run:`, which records the pipeline that steps in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.errors import RecordError
from penstock.runtime.recording.recorder import Recorder
from penstock.timeline import Recording

# Each rank has its own, also where ranks are threads of one process.
_ACTIVE: ContextVar["RecordedRun | None"] = ContextVar("penstock.record", default=None)


class RecordedRun:
    """The steps that a block records; `recording` is available once the block has ended."""

    def __init__(self, *, counts_memory: bool = False) -> None:
        self._recorder = Recorder(counts_memory=counts_memory)
        self._watched: list[Recorder] | None = None
        self._gather: Callable[[Recorder], Recording] | None = None
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise RecordError(
                "the recording is not available yet: it is gathered from all ranks at the end of "
                "the block. Use it after the `with penstock.record() as run:` block."
            )
        return self._recording

    def watch(self, recorders: list[Recorder], gather: Callable[[Recorder], Recording]) -> None:
        """Add a recorder to those of a pipeline, at its first step in the block."""
        if self._watched is None:
            self._watched, self._gather = recorders, gather
            recorders.append(self._recorder)
        elif self._watched is not recorders:
            raise RecordError(
                "two pipelines ran steps in one `with penstock.record()` block, which records only "
                "one. Use a block for each, or Pipeline(..., record=True)."
            )

    def stop(self) -> None:
        """Stop recording at the end of the block, also after an error."""
        if self._watched is not None:
            self._watched.remove(self._recorder)

    def gather(self) -> None:
        """Gather the recording of all ranks, after the block has ended without an error."""
        if self._gather is None:
            raise RecordError(
                "nothing was recorded: no pipeline ran a step in this block, on this rank. Put the "
                "steps inside the block; if ranks are threads, put the block inside their function."
            )
        self._recording = self._gather(self._recorder)


def active_run() -> RecordedRun | None:
    """Return the run that is being recorded here, if there is one."""
    return _ACTIVE.get()


@contextmanager
def record(*, memory: bool = False) -> Iterator[RecordedRun]:
    """Record the steps of one pipeline in this block; the last 100, if there are more.

    With `memory`, the first step measures memory in place of its times, and is slow.

    All ranks must record the same steps. They gather the recording at the end of the block:

        with penstock.record() as run:
            for batch in batches:
                pipeline.step(batch)
        run.recording.save("run.json")
    """
    run = RecordedRun(counts_memory=memory)
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)
        run.stop()
    run.gather()
