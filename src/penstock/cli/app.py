"""The command `penstock`: its subcommands, and the handling of errors.

Each subcommand is a file in this folder. Slow imports, above all torch, are in the functions that
need them, so that the command starts at once.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from penstock.cli.compare_command import compare
from penstock.cli.convert_command import convert
from penstock.cli.demo_command import demo
from penstock.cli.dry_run_command import dry_run
from penstock.cli.export_command import export
from penstock.cli.list_command import list_schedules
from penstock.cli.plan_command import plan
from penstock.cli.run_command import run
from penstock.cli.search_command import search
from penstock.cli.show_command import show
from penstock.cli.simulate_command import simulate
from penstock.cli.studio_command import studio
from penstock.cli.train_command import train
from penstock.cli.verify_command import verify
from penstock.errors import PipelineError

_INTERRUPTED = 130  # As in shells: 128 plus the number of the signal.

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(show)
app.command()(simulate)
app.command()(studio)
app.command()(compare)
app.command()(search)
app.command()(plan)
app.command()(dry_run)
app.command()(verify)
app.command()(convert)
app.command()(train)
app.command()(export)
app.command()(run)
app.command("list")(list_schedules)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib import metadata

        print(f"penstock {metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Pipeline-parallel training for PyTorch that keeps every rank busy.

    "penstock COMMAND --help" describes each command, with examples.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit."""
    given = list(sys.argv[1:] if args is None else args)
    is_debug = "--debug" in given
    # It may be given anywhere, but only the root command accepts it.
    given = [arg for arg in given if arg != "--debug"] or ["--help"]
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal has every character.
    try:
        code = app(given, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer returns this after Ctrl-C.
            _say("interrupted", code)
    except KeyboardInterrupt:
        code = _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python would print another error at exit.
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
    except (MemoryError, OverflowError) as error:
        if is_debug:
            raise
        code = _say(f"error: the numbers are too large ({_in_one_line(str(error))})", 1)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Replace standard streams that are closed with the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # Open until exit.


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
