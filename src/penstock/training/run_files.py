"""Options in a file: TOML, or YAML where PyYAML is installed."""

import difflib
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from penstock.errors import OptionError
from penstock.extras import needed_by
from penstock.training.settings import TrainConfig, option_of

_OF_MODEL = {"model": str, "layers": int, "width": int, "heads": int, "context": int}
_MOST_BRACKETS = 100
_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def known_options() -> dict[str, Any]:
    """Return the types of all options by their names, as they are typed."""
    hints = get_type_hints(TrainConfig)
    hints = {option_of(name): kind for name, kind in hints.items() if name not in ("model", "_")}
    return {**_OF_MODEL, **hints}


def read_options(path: str) -> dict[str, Any]:
    """Return the options in a file; raise an error for names and values that cannot be."""
    values = _read(path)
    known = known_options()
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else "Expected the names of options."
            raise OptionError(f"{path} has the key {key!r}, which is not an option. {hint}")
        found[name] = _checked(path, name, value, known[name])
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"the options in {path} cannot be read: {error}. Expected a TOML file."
        ) from error
    values: Any
    if path.lower().endswith((".yaml", ".yml")):
        with needed_by(f"the file {path}", ["yaml"], extra="train", error=OptionError):
            yaml = import_module("yaml")
        _check_yaml(path, text)
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise OptionError(f"{path} is not valid YAML: {error}.") from error
    else:
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path} is not valid TOML: {error}.") from error
    if not isinstance(values, dict):
        raise OptionError(f"{path} has no options. Expected lines such as steps = 1000.")
    return values


def _check_yaml(path: str, text: str) -> None:
    """Raise an error for what no options need, and what takes YAML forever: nesting and aliases."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS or re.search(r"(^|[\s,\[{:-])\*\w", text):
        raise OptionError(
            f"{path} has aliases, such as *name, or more than {_MOST_BRACKETS} brackets. Expected "
            "plain options: write each value in full."
        )


def _checked(path: str, name: str, value: Any, kind: Any) -> Any:
    """Return a value as its option has it; raise an error if it is of another type."""
    if kind == tuple[str, ...]:
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return tuple(parts)
        raise OptionError(f"{path}: {name} is {value!r}. Expected a text, or a list of texts.")
    kinds = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    plain = str if isinstance(kinds[0], str) else kinds[0]
    is_right = isinstance(value, int | float if plain is float else plain)
    if not is_right or (isinstance(value, bool) and plain is not bool):
        raise OptionError(f"{path}: {name} is {value!r}. Expected {_NAMES[plain]}.")
    try:
        return float(value) if plain is float else value
    except OverflowError:
        raise OptionError(f"{path}: {name} is too large. Expected {_NAMES[plain]}.") from None
