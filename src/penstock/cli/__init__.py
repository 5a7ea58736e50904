"""The command line: one file for each subcommand."""

import sys
from collections.abc import Sequence

from penstock.errors import OptionError
from penstock.extras import needed_by


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit."""
    try:
        with needed_by("the command line", ["typer", "rich"], extra="cli", error=OptionError):
            import rich  # noqa: F401  # Checked here; commands import what they need from it.

            from penstock.cli import app
    except KeyboardInterrupt:  # Ctrl-C before the commands are loaded.
        sys.exit(130)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    app.main(args)
