"""A main thread that waits where no other thread can interrupt it."""

import sys
import threading
import time
from pathlib import Path

from penstock.watch.vitals import thread_time

_PATIENCE_S = 5.0
_LEAST_SHARE = 0.02
"""The share of its time that a thread computes at least, unless it waits."""


class Blockage:
    """How long the main thread has been waiting inside torch or Penstock, without computing.

    A thread that computes, writes a file or waits in the user's own code is left alone: it gets an
    error when it next waits for another rank.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._computed_s = 0.0
        self.where = ""

    def has_lasted(self) -> bool:
        """Return whether it has lasted for too long; call it about once in a second."""
        now_s = time.monotonic()
        self.where = _waiting_in()
        found = thread_time(threading.main_thread().native_id or 0)
        state, computed_s = found or ("S", 0.0)
        gained_s = computed_s - self._computed_s
        elapsed_s = max(now_s - self._since_s, 1e-3)
        if not self.where or state != "S" or gained_s > _LEAST_SHARE * elapsed_s:
            self._since_s, self._computed_s = now_s, computed_s
        return now_s - self._since_s >= _PATIENCE_S


def _waiting_in() -> str:
    """Return the line of torch or Penstock that the main thread runs, or an empty text."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    if not any(path.is_relative_to(folder) for folder in _folders()):
        return ""
    if path.parent.name == "cli":  # A command that lingers waits for its launcher alone.
        return ""
    return f"{frame.f_code.co_name} ({path}:{frame.f_lineno})"


def _folders() -> list[Path]:
    """Return the folders of Penstock and torch; this room does not import torch."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("penstock", "torch")]
    return [Path(file).parent for file in files if file]
