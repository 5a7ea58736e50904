"""Dicts with keys of any kind as JSON, which would make texts of numbers.

The state of some schedulers of learning rates has such: MultiStepLR counts its milestones by step.
"""

from typing import Any

_PAIRS = "__pairs__"


def with_any_keys(value: Any) -> Any:
    """Return a value in which dicts with other keys than texts are lists of pairs.

    >>> with_any_keys({"milestones": {2: 1}})
    {'milestones': {'__pairs__': [[2, 1]]}}
    """
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: with_any_keys(each) for key, each in value.items()}
        return {_PAIRS: [[key, with_any_keys(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [with_any_keys(each) for each in value]
    return value


def without_keys_apart(value: Any) -> Any:
    """Return the value that `with_any_keys` was given.

    >>> without_keys_apart({"milestones": {"__pairs__": [[2, 1]]}})
    {'milestones': {2: 1}}
    """
    if isinstance(value, list):
        return [without_keys_apart(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_PAIRS}:
            return {key: without_keys_apart(each) for key, each in value[_PAIRS]}
        return {key: without_keys_apart(each) for key, each in value.items()}
    return value
