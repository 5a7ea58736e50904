"""The errors of waits that failed or timed out, and the reports of ranks that failed."""

import time
from collections.abc import Collection

from torch.distributed import distributed_c10d

from penstock.errors import CommError, DeadlineError
from penstock.ir import Rank
from penstock.watch.finding import Finding
from penstock.watch.rank_watch import RankWatch

_FAILURE = "failure"
# The time for which a rank whose connection broke looks for a report of the reason.
_REPORT_GRACE_S = 2.0


class Failures:
    """The reports of failed ranks, in a store that all ranks share, and the findings of a watch.

    `rank` is that of the pipeline's group; the watch names ranks of the world, and `members` are
    those of them that are in the group.
    """

    def __init__(
        self,
        store: distributed_c10d.Store,
        rank: Rank,
        timeout_s: float,
        watch: RankWatch | None,
        members: Collection[int],
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._watch = watch
        # A rank that was dead before concerns this pipeline only if it is one of its own.
        found = [] if watch is None else watch.findings()
        self._elsewhere = [finding for finding in found if finding.rank not in members]

    def report(self, reason: str) -> None:
        """Report why this rank failed; only the first report of all ranks is kept."""
        if not self.find_dead():  # Others know it too, and the store may be out of reach.
            self._store.compare_set(_FAILURE, "", f"rank {self._rank} failed: {reason}")

    def find_dead(self) -> str:
        """Return which ranks the watch has found dead, in words, or an empty text."""
        return "" if self._watch is None else "; ".join(map(self._watch.describe, self._dead()))

    def _dead(self) -> list[Finding]:
        found = [] if self._watch is None else self._watch.findings()
        return [one for one in found if one not in self._elsewhere]

    def explain(self, exc: Exception, awaited: str, waited_s: float) -> CommError:
        """Return an error that says why a wait ended in an exception."""
        is_late = waited_s >= 0.99 * self._timeout_s
        if reason := self._find_reason(0.0 if is_late else _REPORT_GRACE_S):
            return CommError(f"rank {self._rank} stopped waiting for {awaited}, because {reason}")
        if is_late:
            return DeadlineError(
                f"rank {self._rank} timed out after {self._timeout_s:g} s waiting for {awaited}. "
                "See what that rank was doing; if it only needed longer, give the pipeline a "
                "larger timeout."
            )
        lost = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        return CommError(
            f"rank {self._rank} stopped waiting for {awaited}, because the connection was lost "
            f"({lost}). The other process ended without reporting an error: see its logs."
        )

    def _find_reason(self, grace_s: float) -> str:
        """Return a dead rank, or else the first failure that a rank has reported, or nothing.

        The store is not asked once a rank is known to be dead, as it may be on a host that is;
        unless ranks have only ended themselves, which may have reported why.
        """
        until_s = time.monotonic() + grace_s
        while True:
            dead = self.find_dead()
            may_ask = all(finding.has_ended_itself for finding in self._dead())
            if may_ask and (report := self._find_report()):
                return report
            if dead:
                return f"{dead}."
            if time.monotonic() >= until_s:
                return ""
            time.sleep(0.05)

    def _find_report(self) -> str:
        try:
            if self._store.check([_FAILURE]):
                return self._store.get(_FAILURE).decode()
        except RuntimeError:  # The process that keeps the store has ended.
            pass
        return ""
