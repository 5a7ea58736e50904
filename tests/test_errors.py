"""The rules that every exception of Penstock follows."""

import builtins

import pytest

from penstock import errors

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS)
def test_error_is_drawn_in_the_tree(error: type) -> None:
    assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("error", [error for error in ERRORS if error is not errors.PipelineError])
def test_error_is_ours_and_also_a_built_in(error: type) -> None:
    assert issubclass(error, errors.PipelineError)
    built_in = [base for base in error.__mro__ if base.__module__ == builtins.__name__]
    assert not {"Exception", "BaseException", "object"} >= {base.__name__ for base in built_in}
