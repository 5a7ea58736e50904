"""Parameters that several stages hold: after a step, each copy gets the sum of all gradients.

A tied parameter has a copy on each stage that holds it, and a name that the copies share. Copies
that start equal stay equal to the last bit: all get the same sum, added in the same order.

    rank 0   .grad [1]──▶ aside ─────────────────────────────[5]──▶ .grad = aside + total
             stages 0, 7 add up [2]──▶ 0 ──┐    [4] total = 0 + 2 + 3
    rank 2   stage 2            [2]──▶ 2 ──┼─[3]─▶  the same
    rank 3   stage 3            [2]──▶ 3 ──┘        the same
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor, nn

from penstock.backward.structure import describe
from penstock.comm import AbstractComm, Describe, Transfer
from penstock.comm.channels import both_ways
from penstock.comm.collective_results import waited
from penstock.errors import AgreementError, StageError, StepError
from penstock.ir import Rank, StageId
from penstock.ir.message import Channel
from penstock.runtime.messages.sendable import as_sent
from penstock.stage import PipelineStage
from penstock.stage.dtensors import Spread, local_part
from penstock.torch_private import is_dtensor

_TAKES_FLAGS = "rank {} to take the list of tied parameters with gradients".format
_TAKES_GRAD = "rank {} to take the gradient of tied parameter {!r}".format
_FLAGS_FROM = "the list of tied parameters with gradients from rank {}".format
_GRAD_FROM = "the gradient of tied parameter {!r} from rank {}".format


@dataclass(frozen=True, slots=True)
class Claim:
    """A stage's copy of a tied parameter, as its rank describes it to the others."""

    name: str
    stage: StageId
    param_name: str
    described: str
    """Its shape and dtype, and its gradient's dtype if that differs."""
    identity: int
    """The id of the object; it has a meaning only within one process."""


@dataclass(frozen=True, slots=True)
class Ties:
    """The tied parameters of a rank and their other holders, known from its first step on."""

    holders: Mapping[str, tuple[Rank, ...]]
    """The ranks that hold each name, including this one; names and ranks in order."""
    shared_with: Mapping[Rank, tuple[str, ...]]
    """The names that this rank shares with each other rank, in order."""
    stages: frozenset[StageId]
    """The stages of this rank that hold a copy."""

    def channels_of(self, rank: Rank) -> set[Channel]:
        """Return the channels by which `rank`, whose ties these are, exchanges gradients."""
        return both_ways((rank, other) for other in self.shared_with)


def claim(stages: Mapping[StageId, PipelineStage]) -> list[Claim]:
    """Return this rank's claims; raise an error if it ties one parameter under two names."""
    claims = []
    names: dict[int, str] = {}
    for index in sorted(stages):
        for param_name, name, param in stages[index].tied_parameters():
            known = names.setdefault(id(param), name)
            if known != name:
                raise StageError(
                    f"stage {index} ties its parameter {param_name!r} as {name!r}, but the same "
                    f"parameter is tied as {known!r} too, on rank {stages[index].group_rank}. "
                    "Expected one name for each parameter: use one of them on all stages."
                )
            claims.append(Claim(name, index, param_name, _describe(param), id(param)))
    return claims


def tie(rank: Rank, gathered: Sequence[list[Claim]], *, is_one_process: bool) -> Ties:
    """Return the ties of `rank` from the claims of all ranks; raise an error if they disagree."""
    found: dict[str, list[tuple[Rank, Claim]]] = {}
    for holder, claims in enumerate(gathered):
        for held in claims:
            found.setdefault(held.name, []).append((holder, held))
    # A parameter with only one copy needs no exchange.
    found = {name: found[name] for name in sorted(found) if len(found[name]) > 1}
    for name, copies in found.items():
        _check_alike(name, copies)
        if is_one_process:
            _check_apart(name, copies)
    ranks = {name: sorted({holder for holder, _ in copies}) for name, copies in found.items()}
    holders = {name: tuple(ranks[name]) for name in ranks if rank in ranks[name]}
    others = {holder for some in holders.values() for holder in some} - {rank}
    return Ties(
        holders=holders,
        shared_with={
            other: tuple(name for name in holders if other in holders[name])
            for other in sorted(others)
        },
        stages=frozenset(held.stage for held in gathered[rank] if held.name in holders),
    )


def _check_alike(name: str, copies: list[tuple[Rank, Claim]]) -> None:
    first_rank, first = copies[0]
    for rank, held in copies[1:]:
        if held.described != first.described:
            raise AgreementError(
                f"the tied parameter {name!r} is {first.described} on rank {first_rank} "
                f"({first.param_name!r} of stage {first.stage}), but {held.described} on rank "
                f"{rank} ({held.param_name!r} of stage {held.stage}). Expected one shape and dtype "
                "on all stages that hold it, and the same part of it if it is spread over a mesh: "
                "make its copies alike, or leave them out of `tied`."
            )


def _check_apart(name: str, copies: list[tuple[Rank, Claim]]) -> None:
    """Raise an error if ranks share one object: each would add to the other's gradient."""
    ranks: dict[int, Rank] = {}
    for rank, held in copies:
        first = ranks.setdefault(held.identity, rank)
        if first != rank:
            raise AgreementError(
                f"the tied parameter {name!r} is the same object on ranks {first} and {rank} "
                f"({held.param_name!r} of stage {held.stage}). Expected a copy for each rank, as "
                "between processes: give each rank a copy.deepcopy of its stages."
            )


def check_no_grads(ties: Ties, stages: Mapping[StageId, PipelineStage]) -> None:
    """Raise an error if tied parameters have gradients before the first of several open steps.

    These are sums over all copies already, which the exchange in the last step would sum again.
    """
    for index in sorted(ties.stages):
        for param_name, name, param in stages[index].tied_parameters():
            if name in ties.holders and param.grad is not None:
                raise StepError(
                    f"stage {index} on rank {stages[index].group_rank}: the tied parameter "
                    f"{param_name!r} has a gradient before a step with finalize=False. Expected "
                    "none: call zero_grad() before the first of the steps that add up."
                )


class TiedGrads:
    """The gradients of tied parameters in one step: made when it begins, dropped at its end.

    `sets_aside` is False if the gradients from before the step are to be exchanged too.
    """

    def __init__(
        self,
        ties: Ties,
        stages: Mapping[StageId, PipelineStage],
        comm: AbstractComm,
        *,
        sets_aside: bool = True,
    ) -> None:
        self.stages = ties.stages
        self._ties = ties
        self._comm = comm
        self._device = next(iter(stages.values())).device
        self._copies: dict[str, list[_Copy]] = {name: [] for name in ties.holders}
        seen = set()
        for index in sorted(ties.stages):
            for _, name, param in stages[index].tied_parameters():
                # Two stages of a rank may share the parameter itself, which then counts once.
                if name in self._copies and id(param) not in seen:
                    seen.add(id(param))
                    copy = _Copy(param, stages[index].is_data_parallel)
                    if sets_aside:
                        copy.set_aside()
                    self._copies[name].append(copy)

    @torch.no_grad()
    def exchange(self) -> None:
        """Give each copy the sum of all gradients; every rank that holds a copy must call it.

        A channel is first in, first out, and by the end of the program all of the step's other
        messages have been sent and received, so these cannot be confused with them.
        """
        own = {  # [2]
            name: _sum(copy.contribution() for copy in copies)
            for name, copies in self._copies.items()
        }
        sent = self._send(own)
        parts = {self._comm.rank: own, **self._receive()}
        for transfer, described, _ in sent:  # Before [5], which changes what was sent.
            transfer.wait(described)
        for name, ranks in self._ties.holders.items():
            total = _sum(parts[rank].get(name) for rank in ranks)  # [4]
            for copy in self._copies[name]:
                copy.write(total)

    def put_back(self) -> None:
        """Restore the gradients from before the step, after the step has failed."""
        for copies in self._copies.values():
            for copy in copies:
                copy.param.grad = copy.aside

    def _send(self, own: dict[str, Tensor | None]) -> list[tuple[Transfer, Describe, Tensor]]:
        """[3] Send each rank which gradients exist, then those; return what must be kept alive."""
        sent: list[tuple[Transfer, Describe, Tensor]] = []
        ready = {
            name: as_sent(
                grad,
                self._device,
                f"the gradient of tied parameter {name!r}",
                is_dry=self._comm.is_dry,
            )
            for name, grad in own.items()
            if grad is not None
        }
        for rank, names in self._ties.shared_with.items():
            flags = torch.tensor([name in ready for name in names], dtype=torch.uint8)
            flags = flags.to(self._device)
            sent.append((self._comm.send(flags, rank), partial(_TAKES_FLAGS, rank), flags))
            for name in names:
                if name in ready:
                    transfer = self._comm.send(ready[name], rank)
                    sent.append((transfer, partial(_TAKES_GRAD, rank, name), ready[name]))
        return sent

    def _receive(self) -> dict[Rank, dict[str, Tensor | None]]:
        """[3] Return, by rank and name, what each rank has added; absent if it has no gradient."""
        flags = {
            rank: torch.empty(len(names), dtype=torch.uint8, device=self._device)
            for rank, names in self._ties.shared_with.items()
        }
        announced = {rank: self._comm.recv(flags[rank], rank) for rank in flags}
        parts: dict[Rank, dict[str, Tensor | None]] = {rank: {} for rank in flags}
        posted: list[tuple[Transfer, Describe]] = []
        for rank, names in self._ties.shared_with.items():
            announced[rank].wait(partial(_FLAGS_FROM, rank))
            if self._comm.is_dry:  # Nobody says that a gradient is missing.
                are_present = [self._copies[name][0].param.requires_grad for name in names]
            else:
                are_present = flags[rank].tolist()
            for name, is_present in zip(names, are_present, strict=True):
                if is_present:
                    parts[rank][name] = grad = self._copies[name][0].empty(self._device)
                    posted.append((self._comm.recv(grad, rank), partial(_GRAD_FROM, name, rank)))
        for transfer, described in posted:
            transfer.wait(described)
        return parts


@dataclass(slots=True)
class _Copy:
    """One parameter of this rank, and the gradient that it had when the step began."""

    param: nn.Parameter
    is_reduced: bool
    """True if DistributedDataParallel reduces its gradient, perhaps in its present memory."""
    aside: Tensor | None = None

    def set_aside(self) -> None:
        """[1] Set the gradient aside, so that only this step's contribution is collected."""
        self.aside, self.param.grad = self.param.grad, None
        if self.is_reduced and self.aside is not None:
            self.aside = self.aside.clone()

    def contribution(self) -> Tensor | None:
        """Return what this step has added, dense and of the dtype that all copies expect."""
        grad = self._local(self.param.grad)
        return None if grad is None else grad.to_dense().to(_grad_dtype(self.param))

    def empty(self, device: torch.device) -> Tensor:
        """Return a buffer for another copy's contribution."""
        shape = local_part(self.param).shape
        return torch.empty(shape, dtype=_grad_dtype(self.param), device=device)

    def write(self, total: Tensor | None) -> None:
        """[5] Write into the memory that the gradient had before the step, or else got in it."""
        if total is None:
            self.param.grad = self.aside
            return
        aside = self._local(self.aside)
        value = total if aside is None else aside.to_dense() + total
        if (spread := Spread.of(self.param)) is not None:
            mesh = self.param.device_mesh  # type: ignore[attr-defined]  # a DTensor has one
            self.param.grad = spread.whole(value.clone(), mesh)
            return
        home = waited(self.param.grad if self.aside is None else self.aside)
        if home is None or home.layout is not torch.strided:
            home = torch.empty_like(self.param, dtype=value.dtype)
        # The total may be this copy's own gradient, which must not change: others still need it.
        self.param.grad = home.copy_(value)

    def _local(self, grad: Tensor | None) -> Tensor | None:
        """Return what this rank holds of a gradient that is spread like the parameter."""
        if grad is None or not is_dtensor(grad):
            return waited(grad)
        # Autograd leaves the gradient of a replicated weight as a sum that is still to be done.
        spread = grad.redistribute(  # type: ignore[attr-defined]  # a method of DTensor
            placements=self.param.placements  # type: ignore[attr-defined]  # so is it
        )
        return local_part(spread)


def _sum(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of the parts that exist, in order; a single part is returned itself."""
    present = [part for part in parts if part is not None]
    return reduce(torch.add, present) if present else None


def _grad_dtype(param: nn.Parameter) -> torch.dtype:
    return param.grad_dtype or param.dtype


def _describe(param: nn.Parameter) -> str:
    if (spread := Spread.of(param)) is not None:
        # Shards are added where they lie, so all copies must have the same one on a rank.
        place = "on no rank of it" if spread.coordinate is None else f"at {spread.coordinate} of it"
        return f"{spread} {place}, with a gradient of {_grad_dtype(param)}"
    if (dtype := _grad_dtype(param)) != param.dtype:
        return f"{describe(param)} with a gradient of {dtype}"
    return describe(param)
