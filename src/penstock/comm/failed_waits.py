"""The errors of waits that failed or timed out, and the reports of ranks that failed."""

import time

from torch.distributed import distributed_c10d

from penstock.errors import CommError, DeadlineError
from penstock.ir import Rank

_FAILURE = "failure"
# The time for which a rank whose connection broke looks for a report of the reason.
_REPORT_GRACE_S = 2.0


class Failures:
    """The reports of failed ranks, in a store that all ranks share."""

    def __init__(self, store: distributed_c10d.Store, rank: Rank, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s

    def report(self, reason: str) -> None:
        """Report why this rank failed; only the first report of all ranks is kept."""
        self._store.compare_set(_FAILURE, "", f"rank {self._rank} failed: {reason}")

    def explain(self, exc: Exception, awaited: str, waited_s: float) -> CommError:
        """Return an error that says why a wait ended in an exception."""
        is_late = waited_s >= 0.99 * self._timeout_s
        if report := self._find_report(0.0 if is_late else _REPORT_GRACE_S):
            return CommError(f"rank {self._rank} stopped waiting for {awaited}, because {report}")
        if is_late:
            return DeadlineError(
                f"rank {self._rank} timed out after {self._timeout_s:g} s waiting for {awaited}. "
                "See what that rank was doing; if it only needed longer, give the pipeline a "
                "larger timeout."
            )
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        return CommError(
            f"rank {self._rank} stopped waiting for {awaited}, because the connection was lost "
            f"({reason}). The other process ended without reporting an error: see its logs."
        )

    def _find_report(self, grace_s: float) -> str:
        """Return the first failure that any rank has reported, or an empty text."""
        until_s = time.monotonic() + grace_s
        try:
            while not self._store.check([_FAILURE]):
                if time.monotonic() >= until_s:
                    return ""
                time.sleep(0.05)
            return self._store.get(_FAILURE).decode()
        except RuntimeError:  # The process that keeps the store has ended.
            return ""
