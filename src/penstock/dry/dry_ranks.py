"""A step of one rank, run by the real runtime without values and without the other ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.comm import AbstractComm, DryGroup
from penstock.cutting import CutModel
from penstock.dry.dry_report import DryRank, Traffic
from penstock.dry.live_storages import LiveStorages, NotingMode, StepMemory
from penstock.dry.message_match import match_transfers
from penstock.dry.stage_forms import StageForms
from penstock.dry.valueless import CPU, valueless_tree, without_values
from penstock.errors import StageError
from penstock.ir import Message, Placement, Rank, Schedule, Skip, StageId
from penstock.ir.action import COMPUTE_TYPES
from penstock.ir.message import Channel
from penstock.parallel.example_batch import ExampleBatch
from penstock.runtime import Pipeline
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form
from penstock.runtime.rank_facts import RankFacts, RankSkips
from penstock.runtime.step_settings import LossFn
from penstock.runtime.tied_parameters import Claim, claim, tie
from penstock.stage import PipelineStage
from penstock.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@contextmanager
def on_shapes_alone() -> Iterator[None]:
    """Run what follows without values; raise an error where these are needed."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as exc:
        raise StageError(
            f"the model cannot run without values: the result of {exc.func} depends on the values "
            "of its input. Leave out of the model, or of its loss, what looks at values."
        ) from exc


@dataclass(frozen=True, slots=True)
class DryPipeline:
    """A pipeline of which any rank can run a step."""

    pieces: CutModel
    schedule: Schedule
    forms: StageForms
    sent: Mapping[Channel, Sequence[Message]]
    """The messages on each channel, in order."""
    batch: ExampleBatch
    """A batch as `step` is given, without values or with them."""
    loss_fn: LossFn
    make_optimizer: MakeOptimizer

    def run(self, rank: Rank) -> DryRank:
        """Run one step of a rank; raise an error unless its messages are what others expect."""
        placement = self.schedule.placement
        held = placement.stages_of(rank)
        modules = [self.pieces.get_stage_module(stage) for stage in held]
        claims = self._claims()
        group = DryGroup(rank, placement.num_ranks, lambda own: self._facts(own, rank, claims))
        live = LiveStorages()
        with on_shapes_alone(), without_values(modules):
            stages = [self._stage(stage, group) for stage in held]
            claims[rank] = claim({stage.stage_index: stage for stage in stages})
            memory = StepMemory(live, modules)
            self._step(stages, memory, live)
            optimizer_bytes = self._optimizer_bytes(modules)
            ties = tie(rank, claims, is_one_process=False)
            tied = {name: param for stage in stages for _, name, param in stage.tied_parameters()}
            tied_bytes = {
                other: [len(names), *(tied[n].nbytes for n in names if tied[n].requires_grad)]
                for other, names in ties.shared_with.items()
            }
            own = list(dict.fromkeys(p for module in modules for p in module.parameters()))
            buffers = dict.fromkeys(b for module in modules for b in module.buffers())
            parameter_bytes = sum(tensor.nbytes for tensor in (*own, *buffers))
        match_transfers(rank, group.transfers, self.sent, self.forms, tied_bytes)
        order = self.schedule.orders[rank]
        return DryRank(
            rank=rank,
            stages=tuple(held),
            num_parameters=sum(parameter.numel() for parameter in own),
            parameter_bytes=parameter_bytes,
            gradient_bytes=memory.grad_bytes,
            optimizer_bytes=optimizer_bytes,
            activation_bytes=memory.most_without_grads,
            step_bytes=memory.most,
            num_actions=sum(isinstance(action, COMPUTE_TYPES) for action in order),
            sent=self._traffic(rank, group.transfers, is_sent=True),
            received=self._traffic(rank, group.transfers, is_sent=False),
        )

    def _stage(self, stage: StageId, group: DryGroup) -> PipelineStage:
        buffers = dict(self.pieces.get_stage_module(stage).named_buffers())
        return self.pieces.build_stage(stage, CPU, group, buffers=buffers)

    def _step(self, stages: list[PipelineStage], memory: StepMemory, live: LiveStorages) -> None:
        pilot = _DryPilot(self.schedule, self.forms, memory)
        pipeline = Pipeline(
            stages,
            pilot,
            num_microbatches=self.schedule.num_microbatches,
            loss_fn=self.loss_fn,
            scale_grads=False,
        )
        args = valueless_tree(self.batch.args)
        kwargs = valueless_tree(self.batch.kwargs)
        target = valueless_tree(self.batch.target)
        for tensor in _tensors(stages):
            live.leave_out(tensor)
        with NotingMode(live):
            pipeline.step(*args, target=target, return_outputs=False, **kwargs)

    def _optimizer_bytes(self, modules: Sequence[nn.Module]) -> int:
        """Return what the optimizer keeps for each parameter of these modules after a step."""
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        if not trained:
            return 0
        optimizer = self.make_optimizer(list(dict.fromkeys(trained)))
        optimizer.step()
        kept = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))

    def _facts(self, own: RankFacts, rank: Rank, claims: Sequence[list[Claim]]) -> list[RankFacts]:
        """Return the facts of all ranks, as each would tell the others."""
        placement = self.schedule.placement
        return [
            own
            if other == rank
            else replace(
                own,
                held=list(placement.stages_of(other)),
                claims=claims[other],
                skips=self._skips(placement.stages_of(other)),
            )
            for other in range(placement.num_ranks)
        ]

    def _skips(self, stages: Sequence[StageId]) -> RankSkips:
        infos = {stage: self.forms.info.stages[stage] for stage in stages}
        return RankSkips(
            {Skip(s, to): count for s, own in infos.items() for to, count in own.skips_out.items()},
            {Skip(at, s): count for s, own in infos.items() for at, count in own.skips_in.items()},
        )

    def _claims(self) -> list[list[Claim]]:
        """Return each rank's claims on tied parameters."""
        placement = self.schedule.placement
        found: list[list[Claim]] = [[] for _ in range(placement.num_ranks)]
        for index, info in enumerate(self.forms.info.stages):
            if info.ties:
                rank = placement.ranks[index]
                stage = PipelineStage(
                    self.pieces.get_stage_module(index),
                    index,
                    placement.num_stages,
                    CPU,
                    group=DryGroup(rank, placement.num_ranks, lambda own: [own]),
                    tied=info.ties,
                )
                found[rank] += claim({index: stage})
        return found

    def _traffic(
        self, rank: Rank, transfers: Mapping[Channel, Sequence[int]], *, is_sent: bool
    ) -> dict[Rank, Traffic]:
        found = {}
        for channel, num_bytes in sorted(transfers.items()):
            own, other = channel if is_sent else (channel.receiver, channel.sender)
            if own == rank:
                found[other] = Traffic(len(self.sent.get(channel, ())), sum(num_bytes))
        return found


class _DryPilot(AbstractPilot):
    """A pilot with one schedule, that knows the forms of all messages and counts memory."""

    def __init__(self, schedule: Schedule, forms: StageForms, memory: StepMemory) -> None:
        self._schedule = schedule
        self._forms = forms
        self._memory = memory

    @property
    def options(self) -> str:
        return "a dry run"

    def start(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Schedule:
        return self._schedule

    def foresee(self) -> Mapping[Message, Form]:
        count = range(self._schedule.num_microbatches)
        return {
            Message(maker, taker, mb): form
            for (maker, taker), form in self._forms.by_ends.items()
            for mb in count
        }

    def make_observer(self) -> Observer:
        return Observer(memory=self._memory)

    def end_step(
        self, observer: Observer, forms: Mapping[Message, Form], work: Sequence[float]
    ) -> Schedule:
        return self._schedule


def _tensors(stages: Iterable[PipelineStage]) -> Iterator[Tensor]:
    for stage in stages:
        yield from stage.submod.parameters()
        yield from stage.submod.buffers()
