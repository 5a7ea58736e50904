"""Differences between the names and signatures of torch.distributed.pipelining and of compat."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

THEIRS, OURS = "torch.distributed.pipelining", "penstock.compat"
MODULES = ("", ".schedules", ".stage", ".microbatch", "._backward", "._IR", "._utils")


def differences() -> Iterator[str]:
    """Yield a line for each public name, method or argument of torch's that compat lacks.

    Arguments count as equal if torch's calls work: the same names in the same order, with the same
    defaults, before any that compat adds. Public names of torch's private modules count too.
    Exceptions must be what torch's are.
    """
    for suffix in MODULES:
        theirs, ours = import_module(THEIRS + suffix), import_module(OURS + suffix)
        for name in _public_names(theirs):
            place = f"{suffix.removeprefix('.') or 'package'}: {name}"
            if not hasattr(ours, name):
                yield f"{place} is missing"
            elif suffix:  # The package has only names of its modules.
                yield from _compare(place, getattr(theirs, name), getattr(ours, name))


def _public_names(module: Any) -> list[str]:
    """The names in __all__, or those defined in the module where it has none."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _compare(place: str, theirs: Any, ours: Any) -> Iterator[str]:
    yield from _compare_calls(place, theirs, ours)
    if not inspect.isclass(theirs):
        return
    own_bases = [base for base in theirs.__mro__ if base.__module__.startswith(THEIRS)]
    for name in sorted({name for base in own_bases for name in vars(base)}):
        if name.startswith("_"):
            continue
        value = getattr(theirs, name)
        if not hasattr(ours, name):
            yield f"{place}.{name} is missing"
        elif callable(value) and not inspect.isclass(value):
            yield from _compare_calls(f"{place}.{name}", value, getattr(ours, name))
    if issubclass(theirs, BaseException):
        expected = {base for base in theirs.__mro__ if base.__module__ == "builtins"}
        for base in sorted(expected - set(ours.__mro__), key=str):
            yield f"{place} is not a {base.__name__}"


def _compare_calls(place: str, theirs: Any, ours: Any) -> Iterator[str]:
    try:
        expected = list(inspect.signature(theirs).parameters.values())
        found = inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return  # Such as values, or classes without a signature.
    positions = {name: number for number, name in enumerate(found) if _by_position(found[name])}
    for number, parameter in enumerate(expected):
        name, own = parameter.name, found.get(parameter.name)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if own is None:
            yield f"{place}({name}) is missing"
        elif _by_position(parameter) and positions.get(name) != number:
            yield f"{place}({name}) is at another position"
        elif parameter.default is not parameter.empty and own.default != parameter.default:
            yield f"{place}({name}) has the default {own.default!r}, not {parameter.default!r}"
    known = {parameter.name for parameter in expected}
    for name, parameter in found.items():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and name not in known and parameter.default is parameter.empty:
            yield f"{place}({name}) is needed by compat only"


def _by_position(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


if __name__ == "__main__":
    print("\n".join(differences()))
