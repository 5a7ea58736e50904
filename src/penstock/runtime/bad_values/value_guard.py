"""Steps whose losses and gradients must be finite, and what happens to those that are not.

each rank     largest values of its modules, losses and gradients    at the end of the step
pipeline      is any of them bad? the first one, over rank 0         one small message each way
replicas      the same among the pipelines that average gradients    if there are several
all ranks     report it, drop the gradients, or raise an error       alike
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from penstock.comm import AbstractComm
from penstock.comm.collective_results import values_of
from penstock.comm.decisions import decide
from penstock.comm.pipelines_together import Peers
from penstock.errors import BadValueError, StageError
from penstock.ir import MicrobatchId, StageId
from penstock.runtime.bad_values.bad_value import BadValue, Phase
from penstock.runtime.bad_values.noted_graph import NotedGraph
from penstock.runtime.bad_values.value_watch import Found, ValueWatch
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.replicas import Replicas
from penstock.runtime.step import Step
from penstock.runtime.step_settings import Settings
from penstock.stage import PipelineStage
from penstock.stage.dtensors import copy_with_spread, local_part
from penstock.torch_private import pytree

LOGGER = logging.getLogger("penstock.bad_values")
BadValues: TypeAlias = Literal["report", "skip", "raise"]
_Row: TypeAlias = tuple[Any, ...]
"""A bad value as plain values."""
_WHAT = "whether all losses and gradients are finite"


class ValueGuard:
    """What a pipeline does about values that are not finite, and what it knows of earlier steps."""

    def __init__(
        self,
        bad_values: BadValues,
        stages: Mapping[StageId, PipelineStage],
        find_peers: Callable[[], Peers],
    ) -> None:
        self.bad_values = bad_values
        self.last: BadValue | None = None
        """The first bad value of the last step that completed gradients."""
        self._stages = stages
        self._first = next(iter(stages.values()))
        self._find_peers = find_peers
        self._peers: Peers | None = None
        self._is_shared = False
        """True if any rank of the pipeline has peers."""
        self._num_steps = 0
        self._graphs: WeakKeyDictionary[fx.GraphModule, NotedGraph] = WeakKeyDictionary()
        self._usual: set[tuple[StageId, str]] = set()
        """Places that were infinite in steps that were fine, such as masks of attention."""
        self._begin()

    @classmethod
    def of(
        cls,
        given: Any,
        settings: Settings,
        stages: Mapping[StageId, PipelineStage],
        replicas: Replicas,
    ) -> "ValueGuard | None":
        """Return what treats steps as `bad_values` says; None if that is None."""
        if given is None:
            return None
        if given not in get_args(BadValues):
            raise StageError(
                f"bad_values is {given!r}. Expected 'report', 'skip' or 'raise', or None to look "
                "for none."
            )
        if settings.loss_fn is None:
            raise StageError(
                f"bad_values is {given!r}, but there is no loss_fn, and only steps with a backward "
                "are looked at. Give one, or leave bad_values out."
            )
        if given == "skip" and settings.on_grads_ready is not None:
            raise StageError(
                "bad_values is 'skip', but on_grads_ready is given, which gets gradients before "
                "all ranks know that they are finite. Expected one of the two: leave "
                "on_grads_ready out, and use the gradients after the step."
            )
        return cls(given, stages, replicas.find_peers)

    def _begin(self) -> None:
        """Forget the steps up to now: the next one begins new gradients."""
        self._before: GradsBefore | None = None
        self._found: list[tuple[Found, MicrobatchId | None]] = []
        self._has_bad_loss = False

    def watched(self, observer: Observer) -> Observer:
        """Return an observer that also notes the values of a step."""
        watch = ValueWatch(observer.memory, self._stages, self._graphs)
        return replace(observer, memory=watch)

    def run(self, step: Step) -> None:
        """Run a step that `watched` observes, and note what is not finite on this rank."""
        watch = step.observer.memory
        assert isinstance(watch, ValueWatch)
        if self._before is None and self.bad_values == "skip":
            self._before = GradsBefore(self._stages)
        with watch.hooked():
            step.run_all()
        self._num_steps += 1
        watch.end()
        order = step.batch.order
        for found in watch.found():
            is_known = found.mb is not None and bool(order)
            self._found.append((found, order[found.mb] if is_known else found.mb))  # type: ignore[index]  # it is known
        self._add_losses(step)

    def settle(self, comm: AbstractComm, *, is_final: bool) -> None:
        """Agree with all ranks on the first bad value, and treat it alike.

        Steps that leave gradients to a later one are settled with that one.
        """
        if not is_final:
            self.last = None
            return
        device = self._first.device
        found = decide(comm, device, self._seen_by_this_rank(), _first_of_a_bad_step, _WHAT)
        if self._peers is None:
            self._peers = self._find_peers()
            self._is_shared = decide(comm, device, bool(self._peers), any, _WHAT)
        if self._is_shared:
            rows = self._peers.gather(found, _WHAT) if self._peers else [found]
            several = [
                replace(BadValue.of_row(row), replica=number).as_row()
                for number, row in enumerate(rows)
                if row is not None
            ]
            found = decide(comm, device, _first_of(several), _first_of, _WHAT)
        self._treat(None if found is None else BadValue.of_row(found))

    def check(self) -> None:
        """Raise an error for the last step if that was asked for; all ranks do."""
        if self.last is not None and self.bad_values == "raise":
            raise BadValueError(
                f"rank {self._first.group_rank}: {self.last}. Expected finite ones: look at what "
                "this part was given, lower the learning rate, or skip such steps with "
                "bad_values='skip'."
            )

    def _treat(self, bad: BadValue | None) -> None:
        if bad is None:
            self._usual |= {(one.stage, one.place) for one, _ in self._found}
        elif self.bad_values == "skip":
            bad = replace(bad, is_skipped=True)
            assert self._before is not None
            self._before.restore()
        self.last = bad
        self._begin()
        if bad is not None and self.bad_values != "raise" and self._first.group_rank == bad.rank:
            LOGGER.warning("%s%s", bad, "; the step is skipped" if bad.is_skipped else "")

    def _add_losses(self, step: Step) -> None:
        stage = self._first.num_stages - 1
        for mb, values in step.losses.values.items():
            if not step.losses.counts(mb):
                continue  # The mean of no values is NaN, and does not count.
            for loss in filter(torch.is_tensor, pytree.tree_leaves(values)):
                value = values_of(local_part(loss)).abs().max().item()
                if not isfinite(value):
                    self._has_bad_loss = True
                    named = "nan" if isnan(value) else "inf"
                    given = step.batch.order[mb] if step.batch.order else mb
                    found = Found(Phase.FORWARD, stage, mb, "loss_fn", named)
                    self._found.append((found, given))

    def _seen_by_this_rank(self) -> tuple[bool, _Row | None]:
        """Return whether a loss or gradient of this rank is bad, and the first bad value here.

        If all losses and gradients are fine, values in between may be what they like.
        """
        rows = [
            self._as_bad_value(number, found, given)
            for number, (found, given) in enumerate(self._found)
            if (found.stage, found.place) not in self._usual
            or found.value == "nan"
            or found.phase is Phase.END
        ]
        is_bad = self._has_bad_loss or any(one.phase is Phase.END for one, _ in self._found)
        return is_bad, min(rows, key=lambda bad: bad.order).as_row() if rows else None

    def _as_bad_value(self, number: int, found: Found, given: MicrobatchId | None) -> BadValue:
        is_forward = found.phase is Phase.FORWARD
        mb = -1 if found.mb is None else found.mb
        order = int(found.phase), mb, found.stage if is_forward else -found.stage, number
        return BadValue(
            step=self._num_steps,
            value=found.value,
            is_loss=self._has_bad_loss,
            phase=found.phase,
            stage=found.stage,
            rank=self._first.group_rank,
            mb=given,
            place=found.place,
            order=order,
        )


def _first_of_a_bad_step(seen: list[tuple[bool, _Row | None]]) -> _Row | None:
    """Return the first bad value of all ranks, if a loss or gradient of any of them is bad."""
    return _first_of([row for _, row in seen]) if any(is_bad for is_bad, _ in seen) else None


def _first_of(rows: Sequence[_Row | None]) -> _Row | None:
    """Return the first of several bad values; None if there is none. It is a loss if any is."""
    found = [BadValue.of_row(row) for row in rows if row is not None]
    if not found:
        return None
    first = min(found, key=lambda bad: (bad.order, bad.replica or 0))
    return replace(first, is_loss=any(bad.is_loss for bad in found)).as_row()


class GradsBefore:
    """The gradients of all parameters before a step; copies of those that there are."""

    def __init__(self, stages: Mapping[StageId, PipelineStage]) -> None:
        self._stages = stages
        parameters = (p for stage in stages.values() for p in stage.submod.parameters())
        self._grads: dict[nn.Parameter, Tensor | None] = {
            p: None if p.grad is None else copy_with_spread(p.grad) for p in parameters
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters the gradients that they had."""
        for stage in self._stages.values():
            stage.drop_unreduced_grads()
        for parameter, grad in self._grads.items():
            parameter.grad = grad
