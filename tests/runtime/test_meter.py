"""Times of actions and bytes of microbatches, as a meter sees them in a step."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, Placement, Schedule, local_ranks
from penstock.comm import AbstractComm
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Message, Send
from penstock.ir.action import compute_parts
from penstock.passes import split_backward
from penstock.runtime.auto.pilot import AbstractPilot
from penstock.runtime.measuring.action_times import Meter, Timing
from penstock.runtime.measuring.held_bytes import HeldBytes
from penstock.runtime.measuring.observer import Observer
from penstock.runtime.messages.forms import Form

CPU = torch.device("cpu")
ROWS, WIDTH = 8, 16
MESSAGE = ROWS * WIDTH * 8
"""Bytes of a microbatch between two layers."""


class Watching(AbstractPilot):
    """Runs one schedule, every step with a meter."""

    def __init__(self, schedule: Schedule, *, counts_memory: bool = False) -> None:
        self._schedule = schedule
        self._counts_memory = counts_memory
        self.observers: list[Observer] = []

    @property
    def options(self) -> str:
        return "watching"

    def start(
        self, comm: AbstractComm, device: torch.device, placement: Placement, num_microbatches: int
    ) -> Schedule:
        assert self._schedule.placement == placement
        return self._schedule

    def make_observer(self) -> Observer:
        return Observer(memory=HeldBytes(CPU)) if self._counts_memory else Observer(Meter(CPU))

    def end_step(
        self, observer: Observer, forms: Mapping[Message, Form], work: Sequence[float]
    ) -> Schedule:
        self.observers.append(observer)
        return self._schedule


def watch(
    make_module: Callable[[], nn.Module],
    schedule: Schedule,
    *,
    num_steps: int = 1,
    counts_memory: bool = False,
    **step_options: Any,
) -> list[list[Any]]:
    """The meters of each rank, or what has counted its memory."""
    torch.manual_seed(0)
    modules = [make_module().double() for _ in range(schedule.num_stages)]
    size = schedule.num_microbatches * ROWS
    x, target = torch.randn(2, size, WIDTH, dtype=torch.float64)

    def main(group: LocalGroup) -> list[Any]:
        stages = [
            PipelineStage(modules[index], index, len(modules), CPU, group=group)
            for index in schedule.placement.stages_of(group.rank)
        ]
        pilot = Watching(schedule, counts_memory=counts_memory)
        pipeline = Pipeline(
            stages,
            pilot,
            num_microbatches=schedule.num_microbatches,
            loss_fn=lambda outputs, wanted: ((outputs - wanted) ** 2).mean(),
        )
        for _ in range(num_steps):
            pipeline.step(x, target=target, **step_options)
        return [seen.memory if counts_memory else seen.clock for seen in pilot.observers]

    return local_ranks(schedule.num_ranks, main)


def make(name: str, num_microbatches: int = 4) -> Schedule:
    return penstock.schedules.get(name)(num_ranks=2, num_microbatches=num_microbatches)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever someone looks at it."""
    readings = itertools.count(1)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(readings)))


def test_cost_leaves_out_what_an_action_waited_but_not_the_receipt() -> None:
    timing = Timing(10.0, (0.25, 3.0), ended_s=16.0, sending_s=0.5)
    assert 16 - 10 - 3 - 0.25 + 0.5 == timing.cost_s(0.0)
    # The first message was there already: taking it took 0.25, and would have taken 0.5 at most.
    assert 16 - 10 - 2.5 + 0.5 == timing.cost_s(0.5)


@pytest.mark.usefixtures("clock")
def test_send_is_part_of_the_action_that_made_the_message() -> None:
    meter = Meter(CPU)
    meter.begin()  # 1
    meter.wait_for([], lambda: "a message")  # 2 to 3
    meter.end(Forward(1, 0))  # 4
    meter.end(Backward(1, 0))  # 5
    meter.end(Send(Message(1, 0, 0)))  # 6
    expected = {
        Forward(1, 0): Timing(1.0, (1.0,), 4.0),
        Backward(1, 0): Timing(4.0, (), 5.0, sending_s=1.0),
    }
    assert expected == meter.timings
    assert (1.0, 6.0) == (meter.began_s, meter.ended_s)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-V", "DualPipeV"])
def test_every_forward_and_backward_is_timed_and_nothing_is_lost(name: str) -> None:
    schedule = make(name)
    for order, (_, meter) in zip(
        schedule.orders, watch(two_layers, schedule, num_steps=2), strict=True
    ):
        assert {part for action in order for part in compute_parts(action)} == set(meter.timings)
        timings = meter.timings.values()
        total_s = sum(timing.ended_s - timing.began_s + timing.sending_s for timing in timings)
        assert pytest.approx(meter.ended_s - meter.began_s) == total_s
        assert all(0 < timing.cost_s(0.0) for timing in timings)


def test_wait_for_a_message_is_no_part_of_an_actions_time() -> None:
    _, (first, second) = watch(two_layers, make("1F1B"), num_steps=2)
    for meter in (first, second):
        timing = meter.timings[Forward(1, 0)]
        assert timing.began_s + sum(timing.waits_s) <= timing.ended_s
        # It waited for the other rank's forwards, and then did one of its own.
        assert timing.cost_s(0.0) == pytest.approx(
            timing.ended_s - timing.began_s - sum(timing.waits_s)
        )
        assert timing.waits_s


@pytest.mark.parametrize("keeps_outputs", [True, False])
@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_bytes_of_two_layers_are_those_that_autograd_and_the_pipeline_keep(
    name: str, keeps_outputs: bool
) -> None:
    schedule = make(name)
    schedule = split_backward(schedule)
    ranks = watch(
        two_layers, schedule, num_steps=2, counts_memory=True, return_outputs=keeps_outputs
    )
    after_forward, after_input = join_held([counts[-1] for counts in ranks])
    last = schedule.num_stages - 1
    for stage in range(schedule.num_stages):
        came_as_message = stage > 0 and is_message(schedule, stage)
        # The result of tanh and the output; the input, if another rank sent it; of the loss its
        # difference and itself.
        expected = 2 * MESSAGE + came_as_message * MESSAGE + (stage == last) * (MESSAGE + 8)
        assert [expected] * 4 == after_forward[stage]
        # The two layers' inputs and the gradients of their outputs. The first stage's input is the
        # caller's, and its graph stays as it was, because nobody waits for its input's gradient.
        held = 3 if stage == 0 else 4
        assert [held * MESSAGE] * 4 == after_input[stage]


def test_checkpointed_stage_holds_its_input_and_output_only() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layers, x, use_reentrant=False)

    ranks = watch(Checkpointed, split_backward(make("1F1B")), num_steps=2, counts_memory=True)
    after_forward, _ = join_held([counts[-1] for counts in ranks])
    assert [1 * MESSAGE] * 4 == after_forward[0]
    assert [3 * MESSAGE + 8] * 4 == after_forward[1]


@pytest.mark.filterwarnings("ignore:.* compiled by torch.compile")
def test_compiled_stage_holds_what_it_saves() -> None:
    def compiled() -> nn.Module:
        module = two_layers()
        module.compile(backend="aot_eager")
        return module

    ranks = watch(compiled, split_backward(make("1F1B")), num_steps=2, counts_memory=True)
    after_forward, after_input = join_held([counts[-1] for counts in ranks])
    assert [2 * MESSAGE] * 4 == after_forward[0]
    # The first stage's whole backward waits, with the gradient that has arrived; the second has
    # computed the gradients of its weights.
    assert [3 * MESSAGE] * 4 == after_input[0]
    grads = sum(param.numel() * 8 for param in two_layers().parameters())
    assert [grads] * 4 == after_input[1]


def test_views_and_results_in_place_make_no_bytes() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x).unflatten(-1, (2, -1)).transpose(-1, -2)
            return y.mul_(2).transpose(-1, -2).flatten(-2)

    ranks = watch(Views, split_backward(make("1F1B")), num_steps=2, counts_memory=True)
    after_forward, _ = join_held([counts[-1] for counts in ranks])
    assert [MESSAGE] * 4 == after_forward[0]


def test_weight_backward_is_timed_by_itself() -> None:
    ranks = watch(two_layers, split_backward(make("1F1B")))
    kinds = [type(action) for action in ranks[0][0].timings]
    assert [Forward, Forward, BackwardInput, BackwardWeight] == kinds[:4]


def join_held(counts: Sequence[HeldBytes]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    after_forward: dict[int, list[int]] = {}
    after_input: dict[int, list[int]] = {}
    for count in counts:
        after_forward |= count.after_forward
        after_input |= count.after_input
    return after_forward, after_input


def is_message(schedule: Schedule, stage: int) -> bool:
    ranks = schedule.placement.ranks
    return ranks[stage] != ranks[stage - 1]
