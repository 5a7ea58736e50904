"""Keep the times and memory of a pipeline's steps on one rank, and gather those of all ranks."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from penstock.comm import AbstractComm, check_agreement
from penstock.comm.decisions import decide
from penstock.ir import Action, Placement, Reshard, Schedule
from penstock.ir.action import SINGLE_COMPUTE_TYPES, Sharding, SingleCompute
from penstock.passes.held_memory import Held
from penstock.runtime.measuring.action_bytes import ActionBytes
from penstock.runtime.measuring.action_times import Collective, Meter
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.recording.clocks import seconds_ahead
from penstock.timeline import RecordedStep, Recording, Timeline

MOST_STEPS = 100

_RankMemory: TypeAlias = dict[SingleCompute, Held]
"""The memory of one rank at each action of a step; empty if it was not counted."""


class _Spell(NamedTuple):
    """An action, from the arrival of its messages to the end of its sends."""

    action: SingleCompute | Sharding
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _RankStep:
    """A step on one rank."""

    number: int
    spells: tuple[_Spell, ...]


class Recorder:
    """The last steps of a pipeline on this rank, at most `MOST_STEPS` of them.

    Counting memory is slow. With `counts_memory`, the first step of each schedule is used for that
    in place of its times.
    """

    def __init__(self, *, counts_memory: bool = False) -> None:
        self._counts_memory = counts_memory
        self._counted: Schedule | None = None
        """The schedule whose memory was counted last."""
        self._memory: _RankMemory = {}
        self._steps: deque[tuple[int, Meter]] = deque(maxlen=MOST_STEPS)
        self._num_steps = 0

    def wants_memory(self, schedule: Schedule) -> bool:
        """Return whether the next step, of this schedule, should count memory."""
        return self._counts_memory and schedule is not self._counted

    def take(self, observer: Observer, schedule: Schedule) -> None:
        """Count a step that has ended; keep its times, or the memory that it counted."""
        if isinstance(observer.clock, Meter):
            self._steps.append((self._num_steps, observer.clock))
        if isinstance(observer.memory, ActionBytes) and self._counts_memory:
            self._counted, self._memory = schedule, observer.memory.held
        self._num_steps += 1

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def gather(
        self,
        comm: AbstractComm,
        device: torch.device,
        placement: Placement,
        num_microbatches: int,
    ) -> Recording:
        """Return what all ranks have recorded, on the clock of rank 0. All ranks must call it."""
        # Not over the channels: a rank that did not call this would take it for an activation.
        numbers = [number for number, _ in self._steps]
        check_agreement(
            comm.gather({"which steps were recorded": numbers}, "to gather the recording")
        )
        ahead_s = seconds_ahead(comm, device)
        own = [_RankStep(number, _spells(meter, ahead_s)) for number, meter in self._steps]

        def join(ranks: list[tuple[list[_RankStep], _RankMemory]]) -> Recording:
            recording = Recording(
                tuple(
                    RecordedStep(steps[0].number, _timeline(steps, placement, num_microbatches))
                    for steps in zip(*(steps for steps, _ in ranks), strict=True)
                )
            )
            return replace(
                recording, memory=_along(recording.schedule, [held for _, held in ranks])
            )

        return decide(comm, device, (own, self._memory), join, "the recording of all ranks")


def _spells(meter: Meter, ahead_s: float) -> tuple[_Spell, ...]:
    """Return the rank's actions between its waits: one ends where the next is free to begin.

    Gathers and reductions run beside the others, one after the other, and may end later.
    """
    begun: list[tuple[SingleCompute | Sharding, float, float]] = []
    collectives = deque(meter.collectives)
    ran_until_s: dict[int, float] = {}  # By place in `begun`.
    for place, (action, timing) in enumerate(meter.timings.items()):
        while collectives and collectives[0].place <= place:
            _add_collective(collectives.popleft(), begun, ran_until_s)
        begun.append((action, timing.began_s, timing.began_s + sum(timing.waits_s)))
    for one in collectives:
        _add_collective(one, begun, ran_until_s)
    ends_s = [*(began_s for _, began_s, _ in begun), meter.ended_s][1:]
    return tuple(
        _Spell(action, start_s - ahead_s, ran_until_s.get(place, end_s) - ahead_s)
        for place, ((action, _, start_s), end_s) in enumerate(zip(begun, ends_s, strict=True))
    )


def _add_collective(
    one: Collective,
    begun: list[tuple[SingleCompute | Sharding, float, float]],
    ran_until_s: dict[int, float],
) -> None:
    """Add a gather, free or reduction, which begins when the collective before it has ended."""
    start_s = one.began_s
    if not isinstance(one.action, Reshard):
        start_s = max([start_s, *ran_until_s.values()])
        ran_until_s[len(begun)] = max(start_s, one.ended_s)
    begun.append((one.action, one.began_s, start_s))


def _along(schedule: Schedule, ranks: Sequence[_RankMemory]) -> tuple[tuple[Held, ...], ...]:
    """Return the memory at each action of the orders; nothing if another schedule was counted."""
    rows = []
    for order, memory in zip(schedule.orders, ranks, strict=True):
        if memory.keys() != {
            action for action in order if isinstance(action, SINGLE_COMPUTE_TYPES)
        }:
            return ()
        rows.append(tuple(_held_at_each(order, memory)))
    return tuple(rows)


def _held_at_each(order: Sequence[Action], memory: _RankMemory) -> Iterator[Held]:
    held = Held(0, 0)
    for action in order:
        if isinstance(action, SINGLE_COMPUTE_TYPES):
            held = memory[action]
        else:  # What gathers and frees change shows in the actions after them.
            held = Held(held.after, held.after)
        yield held


def _timeline(ranks: Sequence[_RankStep], placement: Placement, num_microbatches: int) -> Timeline:
    """Return the timeline of one step of all ranks, from the earliest start on."""
    zero_s = min(step.spells[0].start_s for step in ranks)
    orders = [[spell.action for spell in step.spells] for step in ranks]
    # A clock shows no more than nanoseconds, and fewer digits make smaller files.
    starts = (tuple(round(spell.start_s - zero_s, 9) for spell in step.spells) for step in ranks)
    ends = (tuple(round(spell.end_s - zero_s, 9) for spell in step.spells) for step in ranks)
    schedule = Schedule(orders, placement, num_microbatches)
    return Timeline(schedule, tuple(starts), tuple(ends))
