"""The user's own code: found by name, called, and its errors reported in one line."""

import difflib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import OptionError, PipelineError

_EXPECTED = "Expected module:function, such as my_model:make, or my_model.py:make."
_NOT_THE_USERS = (Path(__file__).parent, Path(sysconfig.get_paths()["stdlib"]))


def load_function(name: str) -> Callable[[], Any]:
    """Return the function that `module:function` or `file.py:function` names.

    Modules are found in the current folder too, as with `python -m`.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise OptionError(f"{name!r} does not name a function. {_EXPECTED}")
    folder = Path()
    if module_name.endswith(".py"):
        folder, module_name = Path(module_name).parent, Path(module_name).stem
    sys.path.insert(0, str(folder.resolve()))
    with errors_in_one_line(f"{module_name} cannot be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as exc:
            if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
                raise  # The user's module imports another one that is missing.
            raise OptionError(
                f"The module {module_name!r} is neither in {folder.resolve()} nor installed. "
                f"{_EXPECTED}"
            ) from exc
    found = getattr(module, function_name, None)
    if found is None:
        close = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise OptionError(f"{module_name} has no {function_name!r}.{hint}")
    if not callable(found):
        raise OptionError(
            f"{name} is a {type(found).__name__}. Expected a function that can be called without "
            "arguments."
        )
    function: Callable[[], Any] = found
    return function


@contextmanager
def errors_in_one_line(what: str) -> Iterator[None]:
    """Turn an error of the user's code into ours, with the line that raised it."""
    try:
        yield
    except PipelineError:
        raise
    except (Exception, SystemExit) as exc:
        raise OptionError(f"{what}: {_describe(exc)}") from exc


def _describe(exc: BaseException) -> str:
    said = " ".join(str(exc).split())
    text = f"{type(exc).__name__}: {said}" if said else type(exc).__name__
    if isinstance(exc, SyntaxError) and exc.filename is not None:
        return text  # Its text has the line; the last frame is only the import.
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text


def _is_users(filename: str) -> bool:
    path = Path(filename)
    is_library = "site-packages" in path.parts or any(
        root in path.parents for root in _NOT_THE_USERS
    )
    return path.exists() and not is_library
