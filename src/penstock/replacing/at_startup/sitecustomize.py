"""Replace torch.distributed.pipelining at the start of a Python process.

`penstock run` puts this folder into PYTHONPATH, and Python imports `sitecustomize` from it. If the
environment has a module of that name already, it is imported afterwards.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

_OWN = Path(__file__).parent


def _replace() -> None:
    try:
        install = import_module("penstock.replacing.import_hook").install
    except ModuleNotFoundError as exc:
        sys.stderr.write(
            f"penstock: {sys.executable} has no module {exc.name}, so torch.distributed.pipelining "
            "stays torch's own in this process. Install Penstock for this Python.\n"
        )
    else:
        install()
    sys.path[:] = [entry for entry in sys.path if Path(entry) != _OWN]
    own_module = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as exc:
        if exc.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own_module  # Python looks for it once this has run.


# Not in a program that merely imports every file of Penstock, as doctests do.
if _OWN in map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    _replace()
