"""A studio that runs as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from process_marks import marked

PROGRAM = Path(sys.executable).with_name("penstock")
DEADLINE_S = 60.0


class Studio:
    """A studio that runs."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process, self.mark = process, mark
        assert process.stdout is not None
        self.address = process.stdout.readline().split()[-1]
        assert "Ctrl-C stops it.\n" == process.stdout.readline()

    @property
    def fields(self) -> dict[str, str]:
        """What the page begins with."""
        query = parse_qs(urlsplit(self.address).query)
        return {name: value for name, [value] in query.items()}

    def get(self, path: str) -> str:
        with urlopen(self.address.split("?")[0] + path, timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """As Ctrl-C does: its whole group gets the signal."""
        os.killpg(self.process.pid, number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextmanager
def studio(*args: object) -> Iterator[Studio]:
    with (
        marked() as (mark, environment),
        subprocess.Popen(
            [PROGRAM, "studio", "--no-open", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Studio(process, mark)
        finally:
            process.kill()
