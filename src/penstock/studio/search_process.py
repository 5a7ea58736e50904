"""Searches in separate processes, so that a search that is no longer needed can be stopped.

[1] The server writes the question to the process, [2] which answers and ends. The server keeps
[1] open meanwhile: [3] if it closes, the server has ended, and the search ends too.
"""

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from penstock.errors import FieldError

T = TypeVar("T")


async def run_apart(search: Callable[..., T], *args: object) -> T:
    """Return the result of a function in another process; cancelling this stops the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # Do not import from the folder where the studio was started.
        "-m",
        __name__,
        stdin=PIPE,
        stdout=PIPE,
        start_new_session=True,  # Ctrl-C is for the server, which then stops the search.
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(pickle.dumps((search, args)))  # [1]
        found = await process.stdout.read()
        code = await process.wait()
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.kill()
    if code != 0:
        raise FieldError(
            {
                "search": f"The search ended with exit code {code}, most likely because it "
                "ran out of memory. Choose fewer ranks or microbatches, or turn the search off."
            }
        )
    result: T = pickle.loads(found)
    return result


def main() -> None:
    """Answer one question."""
    search, args = pickle.load(sys.stdin.buffer)
    Thread(target=_end_with_the_server, daemon=True).start()
    sys.stdout.buffer.write(pickle.dumps(search(*args)))  # [2]


def _end_with_the_server() -> None:
    os.read(sys.stdin.fileno(), 1)  # Not through the buffer, which is locked while it waits.
    os._exit(1)  # [3]


if __name__ == "__main__":
    main()
