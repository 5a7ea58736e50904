"""The command line: one file for each subcommand."""

from penstock.cli.app import main

__all__ = ["main"]
