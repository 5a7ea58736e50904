"""A process that runs commands as a rank: those that its launcher writes to its standard input.

It ends with its command, unless that was stopped because another rank failed. Then it says so, and
waits for the next one, in another group of ranks.
"""

import gc
import json
import os
import sys

from penstock.cli.app import main
from penstock.training.launching import end_with_launcher
from penstock.training.rank_processes import STOPPED_BY_ANOTHER


def run_commands() -> None:
    """Run commands until one ends, or the launcher does."""
    replies = [int(number) for number in sys.argv[1:]]
    end_with_launcher(os.environ)
    import penstock.training.worker  # noqa: F401  # It takes seconds: a spare is to be ready.

    for line in sys.stdin:
        command = json.loads(line)
        os.environ.update(command["environment"])
        code = _run(command["arguments"])
        if code != STOPPED_BY_ANOTHER or not replies:
            sys.exit(code)
        _leave_group()
        os.write(replies[0], b"stopped")


def _run(arguments: list[str]) -> int | str | None:
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code
    raise AssertionError("main always exits")


def _leave_group() -> None:
    """End what is left of the failed command, so that another can begin in this process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # Its stages and connections, which are circles.


if __name__ == "__main__":
    run_commands()
