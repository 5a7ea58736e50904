"""A clock for work that an accelerator may do after the call."""

import time

import torch


def seconds() -> float:
    """Return the time in seconds, once the accelerator has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
