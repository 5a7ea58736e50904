"""A studio that runs as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from limits import HANG_S
from process_marks import end_with_the_tests, marked

PROGRAM = Path(sys.executable).with_name("penstock")


class Studio:
    """A studio that runs."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process, self.mark = process, mark
        self.address = self._read_line().split()[-1]
        assert "Ctrl-C stops it.\n" == self._read_line()

    def _read_line(self) -> str:
        out = self.process.stdout
        assert out is not None
        lines: list[str] = []
        reading = Thread(target=lambda: lines.append(out.readline()), daemon=True)
        reading.start()
        reading.join(HANG_S)
        assert lines, "the studio says nothing"
        return lines[0]

    @property
    def fields(self) -> dict[str, str]:
        """What the page begins with."""
        query = parse_qs(urlsplit(self.address).query)
        return {name: value for name, [value] in query.items()}

    def get(self, path: str) -> str:
        with urlopen(self.address.split("?")[0] + path, timeout=HANG_S) as answer:
            return str(answer.read().decode())

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """As Ctrl-C does: its whole group gets the signal."""
        os.killpg(self.process.pid, number)
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err


@contextmanager
def studio(*args: object, folder: Path | None = None, **variables: str) -> Iterator[Studio]:
    """`variables` are added to the environment; where one is DISPLAY, a browser is opened."""
    opened = "--open" if "DISPLAY" in variables else "--no-open"
    with (
        marked() as (mark, environment),
        subprocess.Popen(
            [PROGRAM, "studio", opened, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, **variables},
            cwd=folder,
            start_new_session=True,
            preexec_fn=end_with_the_tests,
        ) as process,
    ):
        try:
            yield Studio(process, mark)
        finally:
            process.kill()
