"""`with penstock.record() as run:` records the pipeline that steps within the block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.errors import RecordError
from penstock.runtime.recording.recorder import Recorder
from penstock.timeline import Recording

# Each rank has its own, also where ranks are threads of one process.
_ACTIVE: ContextVar["RecordedRun | None"] = ContextVar("penstock.record", default=None)


class RecordedRun:
    """What a block records; `recording` is there when the block has ended."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._watched: list[Recorder] | None = None
        self._gather: Callable[[Recorder], Recording] | None = None
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise RecordError(
                "the recording is not there yet: it is gathered from all ranks where the block "
                "ends. Use it after the block of `with penstock.record() as run:`."
            )
        return self._recording

    def watch(self, recorders: list[Recorder], gather: Callable[[Recorder], Recording]) -> None:
        """A pipeline with these recorders steps: from its first step on there is one more."""
        if self._watched is None:
            self._watched, self._gather = recorders, gather
            recorders.append(self._recorder)
        elif self._watched is not recorders:
            raise RecordError(
                "two pipelines were stepped in one block of `with penstock.record()`, which "
                "records one. Use a block for each, or Pipeline(..., record=True)."
            )

    def stop(self) -> None:
        """The block has ended, well or not."""
        if self._watched is not None:
            self._watched.remove(self._recorder)

    def gather(self) -> None:
        """The block has ended well, on all ranks."""
        if self._gather is None:
            raise RecordError(
                "nothing was recorded: no pipeline ran a step in this block, on this rank. Put the "
                "steps into the block; where ranks are threads, put the block into their function."
            )
        self._recording = self._gather(self._recorder)


def active_run() -> RecordedRun | None:
    """The run that is recorded here and now."""
    return _ACTIVE.get()


@contextmanager
def record() -> Iterator[RecordedRun]:
    """Records the steps of one pipeline in this block; the last 100, if there are more.

    All ranks must record the same steps, and gather what they have at the end of the block:

        with penstock.record() as run:
            for batch in batches:
                pipeline.step(batch)
        run.recording.save("run.json")
    """
    run = RecordedRun()
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)
        run.stop()
    run.gather()
