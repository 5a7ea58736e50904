"""`penstock run`: start a program on Penstock in place of torch.distributed.pipelining."""

import os
import shutil
import sys
from typing import Annotated

import typer

from penstock.errors import OptionError
from penstock.replacing.import_hook import COMPARE, startup_folder


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND [ARGUMENTS]", help="The program, as it is started now."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run the first step on torch's schedules too; compare gradients."
        ),
    ] = False,
    path: Annotated[
        bool, typer.Option("--path", help="Print the folder to put into PYTHONPATH, and exit.")
    ] = False,
) -> None:
    """Start a program in which torch.distributed.pipelining is Penstock's, without changing it.

    This holds in every Python process that it starts. Where the command cannot be changed, put the
    folder that --path prints into PYTHONPATH.

    \b
    penstock run -- torchrun --nproc-per-node 4 train.py --steps 100
    penstock run --compare -- python train.py
    export PYTHONPATH=$(penstock run --path)${PYTHONPATH:+:$PYTHONPATH}
    """
    folder = str(startup_folder())
    if path:
        print(folder)
        return
    if not command:
        raise OptionError(
            "there is no command to run. Expected the program after two hyphens, such as "
            "penstock run -- torchrun --nproc-per-node 2 train.py."
        )
    program = shutil.which(command[0])
    if program is None:
        raise OptionError(
            f"the program {command[0]!r} was not found. Expected one in PATH, such as torchrun or "
            "python, or a path to it."
        )
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, known]))
    if compare:
        os.environ[COMPARE] = "1"
    sys.stdout.flush()
    os.execv(program, command)
