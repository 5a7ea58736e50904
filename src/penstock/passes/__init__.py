"""Changes and checks of schedules, each a pure function."""

from penstock.passes.backward_halves import fuse_backward, split_backward
from penstock.passes.gathering import Gathers, add_gathers, remove_gathers
from penstock.passes.recomputation import add_recompute, remove_recompute
from penstock.passes.sends_and_skips import add_comms, add_sends, remove_comms
from penstock.passes.verification import verify

__all__ = [
    "Gathers",
    "add_comms",
    "add_gathers",
    "add_recompute",
    "add_sends",
    "fuse_backward",
    "remove_comms",
    "remove_gathers",
    "remove_recompute",
    "split_backward",
    "verify",
]
