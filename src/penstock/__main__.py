"""Run the command `penstock` as `python -m penstock`."""

from penstock.cli import main

main()
