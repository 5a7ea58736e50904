"""The command `penstock`: its subcommands, and what becomes of errors.

Each subcommand is a file of this folder. Whatever takes time to import, torch above all, is
imported in the function that needs it, so that the command starts at once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.errors import PipelineError

_INTERRUPTED = 130  # As shells have it: 128, and the number of the signal.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Pipeline-parallel training for PyTorch that leaves no bubbles.

    "penstock COMMAND --help" tells of each command, with examples.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit."""
    given = list(sys.argv[1:] if args is None else args)
    is_debug = "--debug" in given
    # It may stand anywhere, but only the root knows it.
    given = [arg for arg in given if arg != "--debug"]
    try:
        code = app(given, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # Who reads us has had enough, as `head` does. Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except typer.TyperException as error:
        if is_debug:
            raise
        code = _say(f"error: {_in_one_line(error.format_message())}", error.exit_code)
    except (PipelineError, OSError) as error:
        if is_debug:
            raise
        code = _say(f"error: {_in_one_line(str(error))}", 1)
    sys.exit(code)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
