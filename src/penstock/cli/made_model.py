"""The model that a function of the user returns, with its arguments for a whole batch."""

import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import OptionError
from penstock.user_code import errors_in_one_line, load_function

if TYPE_CHECKING:  # torch is loaded when the command runs.
    from torch import nn


def make_given(name: str) -> tuple["nn.Module", dict[str, Any]]:
    """Call the function `name`; return its model, and what it says about it by name.

    These are `batch`, `kwargs`, `loss_fn` and `target`, as `penstock.plan` takes them.
    """
    function = load_function(name)
    with errors_in_one_line(f"{name} failed"):
        made = function()
    return _check_made(name, made)


def quieten_torch() -> None:
    """Log no error of shapes in many lines that we print in one; --debug shows the traceback."""
    from penstock.torch_private import SHAPE_LOGGERS

    for name in SHAPE_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _check_made(name: str, made: Any) -> tuple["nn.Module", dict[str, Any]]:
    """Return the model, and what was said about it, after checking them."""
    from torch import Tensor, nn

    kwargs: Any = {}
    loss_fn: Any = None
    target: Any = None
    match made:
        case (nn.Module() as model, args):
            pass
        case (nn.Module() as model, args, dict() as kwargs):
            pass
        case (nn.Module() as model, args, dict() as kwargs, loss_fn):
            pass
        case (nn.Module() as model, args, dict() as kwargs, loss_fn, target):
            pass
        case _:
            inside = made if isinstance(made, tuple) else (made,)
            types = ", ".join(type(value).__name__ for value in inside)
            raise OptionError(
                f"{name} returned {f'({types})' if isinstance(made, tuple) else types}. Expected "
                "(model, args) or (model, args, kwargs), with a torch.nn.Module and its arguments "
                "for a whole batch; after these, loss_fn, or loss_fn and target."
            )
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        raise OptionError(
            f"{name} returned a {type(args).__name__} as the arguments of the model. Expected a "
            "tuple of its arguments for a whole batch."
        )
    return model, {"batch": tuple(args), "kwargs": kwargs, "loss_fn": loss_fn, "target": target}
