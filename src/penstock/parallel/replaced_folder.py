"""A folder that is replaced by a new one once that is complete.

    .NAME.incomplete    is being written
    .NAME.replaced      had the name before; restored if the new one never got it

Between two renames, neither has the name. A process that is killed there leaves the old folder as
.NAME.replaced, and the next save or load restores it.
"""

import shutil
from pathlib import Path


def begin_folder(path: Path, *, marked_by: str = "") -> Path:
    """Make and return an empty folder, to be written and then given the name `path`.

    With `marked_by`, a folder of that name is replaced only if it is empty or has that file.
    """
    restore_folder(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file")
    if Path.cwd().is_relative_to(path):
        raise OSError(f"{path} is, or has, the current folder, and would be replaced")
    is_other = marked_by and path.exists() and not (path / marked_by).exists()
    if is_other and any(path.iterdir()):
        raise OSError(f"{path} has other files, which would be lost; name a new folder")
    incomplete = path.with_name(f".{path.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)  # Left by a save that was killed.
    incomplete.mkdir(parents=True)
    return incomplete


def complete_folder(incomplete: Path, path: Path) -> Path | None:
    """Give a written folder its name; return where the old one is now, if there was one."""
    old = _replaced(path)
    if not path.exists():
        incomplete.rename(path)
        return None
    path.rename(old)
    try:
        incomplete.rename(path)
    except OSError:
        old.rename(path)
        raise
    return old


def restore_folder(path: Path) -> None:
    """Give a folder its name back if a save was killed before the new one had it."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")
