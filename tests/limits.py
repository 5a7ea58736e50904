"""Time limits that keep a test from hanging.

A test that runs into one has hung: they are far longer than what is waited for takes, also on a
busy machine. Where a test is about time itself, it has a limit of its own, and says so.
"""

HANG_S = 120.0
"""Limit of a single wait, such as the `timeout` of a pipeline."""

PROCESS_S = 2 * HANG_S
"""Limit of whole processes. It is longer, so that waits in them end first, and say what hung."""
