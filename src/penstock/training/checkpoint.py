"""Checkpoints in torch's own format, under the model's own names.

A checkpoint does not depend on stages or ranks: each rank writes what it has and reads what it
needs, so the next run may have another cut, placement and schedule. The keys are

    model.<name>                          a parameter, as in the model's state dict
    optimizer.state.<name>.exp_avg        and so on: the optimizer's state for it

as torch.distributed.checkpoint has them for {"model": model.state_dict(), …}.
"""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from penstock.comm import AbstractComm, LocalGroup
from penstock.errors import OptionError
from penstock.stage import Group, PipelineStage
from penstock.training.saved import Saved, complete, partial_folder, step_folder

_SAVING = "to save the training"


def save(
    folder: Path,
    saved: Saved,
    stages: Sequence[PipelineStage],
    optimizer: torch.optim.AdamW,
    comm: AbstractComm,
    group: Group,
) -> None:
    """Write the state of all ranks, which must all call this.

    The previous checkpoint stays until the new one is complete.
    """
    path = partial_folder(folder, saved.step)
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)  # Left by an earlier attempt.
        path.mkdir(parents=True)
    comm.gather(None, _SAVING)
    try:
        with _quietly():
            _write(_state_of(stages, optimizer), path, comm, group)
    except CheckpointException as error:
        raise OptionError(
            f"the checkpoint {path} could not be written: {_cause(error)}. The previous checkpoint "
            "is unchanged: free some space or name another folder, and resume."
        ) from error
    if comm.rank == 0:
        complete(folder, saved)


def load(
    folder: Path, step: int, stages: Sequence[PipelineStage], optimizer: torch.optim.AdamW
) -> None:
    """Read the state that these stages need; ranks do not have to call this together."""
    path = step_folder(folder, step)
    for parameter in _parameters(stages).values():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    try:
        with _quietly():
            # This fills the given tensors in place, so it sets the parameters.
            state_dict_loader.load(_state_of(stages, optimizer), checkpoint_id=path, no_dist=True)
    except CheckpointException as error:
        raise OptionError(
            f"the checkpoint {path} cannot be read: {_cause(error)}. "
            "Remove it to resume from the previous checkpoint."
        ) from error


def _write(state: dict[str, Tensor], path: Path, comm: AbstractComm, group: Group) -> None:
    if not isinstance(group, LocalGroup):
        state_dict_saver.save(state, checkpoint_id=path, process_group=group)
        return
    # Ranks that are threads see each other's tensors.
    states = comm.gather(state, _SAVING)
    if comm.rank == 0:
        whole = {name: tensor for part in states for name, tensor in part.items()}
        state_dict_saver.save(whole, checkpoint_id=path, no_dist=True)
    comm.gather(None, _SAVING)  # No rank may change its tensors before they are written.


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide torch's warning that ranks do not read together, since that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _parameters(stages: Sequence[PipelineStage]) -> dict[str, nn.Parameter]:
    return {name: p for stage in stages for name, p in stage.submod.named_parameters()}


def _state_of(stages: Sequence[PipelineStage], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    return dict(_named_state(stages, optimizer))


def _named_state(
    stages: Sequence[PipelineStage], optimizer: torch.optim.AdamW
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _parameters(stages).items():
        yield f"model.{name}", parameter.detach()
        for kind, value in optimizer.state[parameter].items():
            yield f"optimizer.state.{name}.{kind}", value


def _cause(error: CheckpointException) -> str:
    """Return the error of the first rank that failed."""
    failed = next(iter(error.failures.values()))
    cause = failed[0]
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
