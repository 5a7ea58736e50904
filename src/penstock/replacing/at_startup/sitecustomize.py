"""Replace torch.distributed.pipelining at the start of a Python process.

`penstock run` puts this folder into PYTHONPATH, and Python imports `sitecustomize` from it. If the
environment has a module of that name already, it is imported afterwards.
"""

import sys
from importlib import import_module
from pathlib import Path

from penstock.replacing.import_hook import install

if __name__ == "sitecustomize":  # Not if a program imports all modules of Penstock.
    install()

    _OWN = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if Path(entry) != _OWN]
    _own_module = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as exc:
        if exc.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = _own_module  # Python looks for it once this has run.
