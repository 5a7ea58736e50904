"""The hook by which `import torch.distributed.pipelining` gives penstock.compat.

It needs no torch, so that it can be installed at the start of any Python process.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from penstock.errors import InstallError

THEIRS = "torch.distributed.pipelining"
OURS = "penstock.compat"
COMPARE = "PENSTOCK_COMPARE"
"""The environment variable with which each schedule runs its first step on torch's too."""

_MIRRORED = ("schedules", "stage", "microbatch", "_backward", "_IR", "_utils")


def install() -> None:
    """Make `import torch.distributed.pipelining`, and its submodules, give Penstock from now on.

    This holds for the whole process. The first import says so on the standard error, on rank 0.
    An error is raised if torch's own package is already loaded, because its names may be in use.
    """
    if any(isinstance(finder, _Replacement) for finder in sys.meta_path):
        return
    if THEIRS in sys.modules:
        users = ", ".join(_users_of_theirs()) or "no module that is still loaded"
        raise InstallError(
            f"{THEIRS} was already imported (its names are used by: {users}), so replacing it now "
            "would leave a part of the program on torch's. Call penstock.compat.install() before "
            "the first import of it, or start the program with `penstock run -- COMMAND`."
        )
    sys.meta_path.insert(0, _Replacement())


def startup_folder() -> Path:
    """Return the folder that installs the hook in each Python process with it in PYTHONPATH."""
    return Path(__file__).parent / "at_startup"


@contextmanager
def torch_in_place() -> Iterator[None]:
    """Let imports give torch's own package in this block, whether it was replaced or not.

    It must be in its place when it runs: pickle looks its classes up by their names.
    """
    finder = next((f for f in sys.meta_path if isinstance(f, _Replacement)), None)
    if finder is None:
        yield
        return
    sys.meta_path.remove(finder)
    ours = _exchange(finder.theirs)
    try:
        yield
    finally:
        finder.theirs = _exchange(ours)  # Kept: a second import of torch's would fail.
        sys.meta_path.insert(0, finder)


class _Replacement(MetaPathFinder, Loader):
    """A finder that answers for torch's package with modules of ours."""

    def __init__(self) -> None:
        self.theirs: dict[str, ModuleType] = {}
        """The modules of torch's own package that were loaded while they were in place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != THEIRS and not fullname.startswith(f"{THEIRS}."):
            return None
        return ModuleSpec(fullname, self, is_package=fullname == THEIRS)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        child = name.removeprefix(THEIRS).removeprefix(".")
        if child and child not in _MIRRORED:
            raise ModuleNotFoundError(
                f"{name} is not there: Penstock has replaced {THEIRS} in this process, and mirrors "
                f"of its modules only {', '.join(_MIRRORED)}.",
                name=name,
            )
        sys.modules[name] = import_module(f"{OURS}.{child}" if child else OURS)
        if not child and os.environ.get("RANK", "0") == "0":
            print(
                f"penstock: {THEIRS} is Penstock's in this process ({OURS})",
                file=sys.stderr,
                flush=True,
            )


def _exchange(modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Put modules in the place of the package, and return those that were there."""
    names = [name for name in sys.modules if name == THEIRS or name.startswith(f"{THEIRS}.")]
    before = {name: sys.modules.pop(name) for name in names}
    sys.modules.update(modules)
    parent, _, child = THEIRS.rpartition(".")
    if THEIRS in modules:
        setattr(sys.modules[parent], child, modules[THEIRS])
    return before


def _users_of_theirs() -> list[str]:
    """Return the modules outside of torch that hold names of torch's package."""
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("torch", "penstock", "__mp_main__")
        and any(
            str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).startswith(
                THEIRS
            )
            for value in list(getattr(module, "__dict__", {}).values())
            if isinstance(value, type | ModuleType) or callable(value)
        )
    )
