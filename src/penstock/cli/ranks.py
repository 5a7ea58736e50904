"""Commands that run on several ranks: the command starts itself again on each rank."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from penstock.errors import CommError
from penstock.training.launching import STOPPED_BY_ANOTHER, end_with_launcher, launch

_LINGER_S = 10.0  # The launcher ends this rank as soon as it has seen the other one end.


def start_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `penstock` with these arguments on `num_ranks` ranks; return the exit code."""
    # main() removed --debug from the arguments.
    debug = ["--debug"] if "--debug" in sys.argv else []
    return launch([*arguments, *debug], num_ranks)


def be_rank(work: Callable[[], None]) -> int:
    """Do a rank's work; return the exit code."""
    end_with_launcher(os.environ)
    try:
        work()
    except CommError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        # Another rank failed first. The launcher must see that rank end before this one.
        time.sleep(_LINGER_S)
        return STOPPED_BY_ANOTHER
    return 0
