"""The cut of a model: balanced, or as the caller says."""

from collections.abc import Mapping, Sequence
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
    # What a model computes itself is in its layers.
    counted = None if isinstance(loss_fn, OwnLoss) else loss_fn
    if microbatch.target is not None and (given is not None or counted is None):
        reason = "the cut was given too"
        if given is None:
            reason = "there is no loss_fn" if loss_fn is None else "the model computes the loss"
        raise StageError(
            "example_target was given, with which a balanced cut counts the loss, but "
            f"{reason}. Leave one of them out."
        )
    args, kwargs = microbatch.args, microbatch.kwargs
    match given:
        case None:
            policy = Balanced(
                placement.num_stages, placement=placement, loss_fn=counted, target=microbatch.target
            )
            pieces = cut_any(model, policy, args, kwargs)
        case Balanced():
            pieces = cut_any(model, given, args, kwargs)
        case CutModel():
            pieces = given
        case Mapping():
            pieces = cut(model, args, kwargs, split_spec=given)
        case str():
            raise StageError(
                f"cut is {given!r}. Expected names of modules, such as ['layers.4', 'layers.8']."
            )
        case Sequence():
            spec = dict.fromkeys(given, SplitPoint.BEGINNING)
            pieces = cut(model, args, kwargs, split_spec=spec)
        case _:
            raise StageError(
                f"cut is a {type(given).__name__}. Expected names of modules at which stages "
                "begin, a split_spec, a Balanced policy, or a CutModel."
            )
    if pieces.num_stages != placement.num_stages:
        raise StageError(
            f"the model was cut into {pieces.num_stages} stages, but the schedule has "
            f"{placement.num_stages} on {placement.num_ranks} ranks. Give one cut less than it has "
            "stages, or another schedule or stages_per_rank."
        )
    return pieces
