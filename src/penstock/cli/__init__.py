"""The command line: one file for each subcommand."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit."""
    try:
        from penstock.cli import app
    except KeyboardInterrupt:  # So soon that not even the commands are known.
        sys.exit(130)
    app.main(args)
