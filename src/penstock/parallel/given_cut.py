"""The cut of a model: balanced, or as the caller says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from penstock.cutting import Balanced, CutModel, SplitPoint, cut, cut_any
from penstock.errors import StageError
from penstock.ir import Placement
from penstock.parallel.example_batch import Microbatch
from penstock.runtime.own_loss import OwnLoss
from penstock.runtime.step_settings import LossFn

Cut: TypeAlias = CutModel | Mapping[str, SplitPoint] | Sequence[str] | Balanced | None


def cut_as_given(
    model: nn.Module,
    given: Cut,
    placement: Placement,
    microbatch: Microbatch,
    loss_fn: LossFn | None,
) -> CutModel:
    """Cut a model into as many stages as the placement has; without a cut, into balanced ones."""
    chosen = chosen_cut(given, placement, microbatch, loss_fn)
    args, kwargs = microbatch.args, microbatch.kwargs
    match chosen:
        case Balanced():
            pieces = cut_any(model, chosen, args, kwargs)
        case CutModel():
            pieces = chosen
        case Mapping():
            pieces = cut(model, args, kwargs, split_spec=chosen)
        case str():
            raise StageError(
                f"cut is {chosen!r}. Expected names of modules, such as ['layers.4', 'layers.8']."
            )
        case Sequence():
            spec = dict.fromkeys(chosen, SplitPoint.BEGINNING)
            pieces = cut(model, args, kwargs, split_spec=spec)
        case _:
            raise StageError(
                f"cut is a {type(chosen).__name__}. Expected names of modules at which stages "
                "begin, a split_spec, a Balanced policy, or a CutModel."
            )
    if pieces.num_stages != placement.num_stages:
        raise StageError(
            f"the model was cut into {pieces.num_stages} stages, but the schedule has "
            f"{placement.num_stages} on {placement.num_ranks} ranks. Give one cut less than it has "
            "stages, or another schedule or stages_per_rank."
        )
    return pieces


def chosen_cut(
    given: Cut, placement: Placement, microbatch: Microbatch, loss_fn: LossFn | None
) -> Cut:
    """Return the cut that was given, or else a balanced one; if balanced, with the loss."""
    balanced = Balanced(placement.num_stages, placement=placement)
    return _with_loss(balanced if given is None else given, microbatch, loss_fn)


def _with_loss(given: Cut, microbatch: Microbatch, loss_fn: LossFn | None) -> Cut:
    """Return a cut that counts the loss, if it is balanced and was not told what the loss costs."""
    counts = isinstance(given, Balanced) and not given.knows_loss
    is_own = isinstance(loss_fn, OwnLoss)  # It is in the model's layers.
    if microbatch.target is not None and (not counts or is_own or loss_fn is None):
        reason = "the cut was given too, and does not count it"
        if counts:
            reason = "the model computes it" if is_own else "there is no loss_fn"
        raise StageError(
            "example_target was given, with which a balanced cut counts the loss, but "
            f"{reason}. Leave one of them out."
        )
    if not isinstance(given, Balanced) or not counts or is_own:
        return given
    return replace(given, loss_fn=loss_fn, target=microbatch.target)
