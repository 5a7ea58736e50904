"""Cut a model the best way that it allows."""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.cutting.cut_model import CutModel
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.rerun_cut import cut_between_layers
from penstock.cutting.traced_cut import cut
from penstock.cutting.untraced_cut import cut_between_modules
from penstock.errors import PartitionError, PipelineError

LOGGER = logging.getLogger("penstock")


def cut_any(
    model: nn.Module,
    stages: int | Balanced,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: dict[str, Any] | None = None,
) -> CutModel:
    """Cut a model into balanced stages: traced if it can be, otherwise without tracing.

    A Sequential is then cut between its modules, any other model between its layers: see
    `cut_between_layers`. `mb_args` and `mb_kwargs` are an example of one microbatch. The log says
    which way was taken, and why not an earlier one. If none works, the error has all reasons.
    """
    policy = Balanced(stages) if isinstance(stages, int) else stages
    kwargs = mb_kwargs or {}
    ways: dict[str, Callable[[], CutModel]] = {
        "by tracing it": lambda: cut(model, mb_args, kwargs, split_policy=policy),
        "between its modules": lambda: cut_between_modules(
            model, policy, mb_args=mb_args, mb_kwargs=kwargs
        ),
        "between its layers": lambda: cut_between_layers(model, policy, mb_args, kwargs),
    }
    reasons: list[str] = []
    for way, attempt in ways.items():
        try:
            pieces = attempt()
        except PipelineError as exc:
            reasons.append(f"{way}: {exc}")
            continue
        except Exception as exc:
            exc.add_note(f"while {type(model).__name__} was cut {way}, after:{_listed(reasons)}")
            raise
        before = "".join(f"\n  not {reason}" for reason in reasons)
        LOGGER.info("%s was cut %s.%s", type(model).__name__, way, before)
        return pieces
    raise PartitionError(f"{type(model).__name__} cannot be cut in any way:{_listed(reasons)}")


def _listed(reasons: list[str]) -> str:
    return "".join(f"\n  {reason}" for reason in reasons)
