"""Commands that run on several ranks: the command starts itself again on each rank."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from penstock.errors import CommError
from penstock.training.launching import Attempt, has_launcher, launch
from penstock.training.rank_processes import STOPPED_BY_ANOTHER, Failure

_LINGER_S = 10.0  # Another launcher ends this rank as soon as it has seen the other one end.
_PROGRAM = "penstock.cli.rank_process"


def start_ranks(
    first: Attempt, go_on: Callable[[Sequence[Failure]], Attempt | None] = lambda failed: None
) -> int:
    """Run `penstock` on ranks; return the exit code.

    After a failure, `go_on` returns what to run next, or None to end.
    """

    def after(failed: Sequence[Failure]) -> Attempt | None:
        following = go_on(failed)
        return None if following is None else _with_debug(following)

    return launch(_with_debug(first), _PROGRAM, after)


def _with_debug(attempt: Attempt) -> Attempt:
    """Give ranks the option --debug, which main() has removed from the arguments."""
    debug = ["--debug"] if "--debug" in sys.argv else []
    return attempt._replace(arguments=[*attempt.arguments, *debug])


def be_rank(work: Callable[[], None]) -> int:
    """Do a rank's work; return the exit code."""
    try:
        work()
    except CommError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if not has_launcher(os.environ):
            # Another rank failed first. The launcher must see that rank end before this one.
            time.sleep(_LINGER_S)
        return STOPPED_BY_ANOTHER
    return 0
