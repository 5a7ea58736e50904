"""`with penstock.record() as run:` records the pipeline that steps within the block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.errors import RecordError
from penstock.sim import Recording

# Each rank has its own, also where ranks are threads of one process.
_ACTIVE: ContextVar["Run | None"] = ContextVar("penstock.record", default=None)


class Run:
    """What a block records; `recording` is there when the block has ended."""

    def __init__(self) -> None:
        self._owner: object = None
        self._gather: Callable[[], Recording] | None = None
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise RecordError(
                "the recording is not there yet: it is gathered from all ranks where the block "
                "ends. Use it after the block of `with penstock.record() as run:`."
            )
        return self._recording

    def watch(self, owner: object, start: Callable[[], Callable[[], Recording]]) -> None:
        """A pipeline steps: at its first step `start` begins to record and gives how to gather."""
        if self._owner is None:
            self._owner, self._gather = owner, start()
        elif self._owner is not owner:
            raise RecordError(
                "two pipelines were stepped in one block of `with penstock.record()`, which "
                "records one. Use a block for each, or Pipeline(..., record=True)."
            )

    def end(self) -> None:
        """The block has ended: gather, with all other ranks."""
        if self._gather is None:
            raise RecordError(
                "nothing was recorded: no pipeline ran a step in this block, on this rank. Put the "
                "steps into the block; where ranks are threads, put the block into their function."
            )
        self._recording = self._gather()


def active_run() -> Run | None:
    """The run that is recorded here and now."""
    return _ACTIVE.get()


@contextmanager
def record() -> Iterator[Run]:
    """Records the steps of one pipeline in this block; the last 100, if there are more.

    All ranks must record the same steps, and gather what they have at the end of the block:

        with penstock.record() as run:
            for batch in batches:
                pipeline.step(batch)
        run.recording.save("run.json")
    """
    run = Run()
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)
    run.end()
