"""Values that skip stages: they train as in the model in one piece, and are let go of in time.

All ranks are in this process; `tests/dist/test_skips_on_processes.py` has real ones.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_custom_parts import random_schedule
from torch import Tensor, nn

import penstock
from fuzzing import IS_LONG, rotated
from local_steps import FOUR_STAGES, NUM_STAGES, mean_square, randn
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, schedules
from penstock.ir import Backward, BackwardInput, BackwardWeight, Forward, Message, Overlap
from penstock.passes import add_comms
from penstock.runtime import ActionContext
from penstock.schedules import Shape
from penstock.schedules.registry import REGISTRY
from shapes import make, shapes
from skip_models import (
    KINDS,
    WIDTH,
    Skip,
    SkipRun,
    SkipStage,
    assert_skips_like_unsplit,
    compute_unsplit,
    make_skip_pipeline,
    possible_skips,
    random_skips,
    train_skips,
    train_skips_unsplit,
)
from stage_training import CPU, SOME_NAMES, TRAINING_NAMES, assert_close, assert_same_grads
from staged_models import named_grads
from tensor_counts import growth_of, live_tensors, weights_and_grads

every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)


def check(run: SkipRun) -> None:
    num_ranks = run.schedule.num_ranks
    assert_skips_like_unsplit(run, penstock.local_ranks(num_ranks, train_skips, run))


def schedule_of(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """As many microbatches, or as many as it needs."""
    generator = schedules.get(name)
    shape = Shape(num_ranks, num_microbatches, generator.stages_per_rank)
    m = max(num_microbatches, generator.min_microbatches(shape))
    return make(generator, shape._replace(m=m))


# Where there are stages to skip. DualPipeV needs many microbatches; all others take one.
GRID = [
    pytest.param(make(generator, shape), id=f"{generator.name}-p{shape.p}-m{shape.m}-v{shape.v}")
    for number, generator in enumerate(REGISTRY)
    if generator.name in TRAINING_NAMES
    for shape in shapes(
        generator,
        ranks=(2, 4) if IS_LONG else (4,),
        microbatches=(1, 3, 9) if IS_LONG else ((9,), (1, 9), (3, 9))[number % 3],
        stages_per_rank=(2,),
    )
    if shape.p * shape.v > 2
]


@pytest.mark.fuzz
@pytest.mark.parametrize("schedule", GRID)
def test_every_schedule_trains_as_unsplit(schedule: Schedule) -> None:
    m = schedule.num_microbatches
    check(SkipRun(schedule, random_skips(schedule.num_stages, m), is_even=m == 1))


@pytest.mark.parametrize("name", TRAINING_NAMES)
def test_every_skip_that_is_possible_at_once(name: str) -> None:
    """Several targets from one stage, and several sources to one."""
    schedule = schedule_of(name, 4, 4)
    pairs = possible_skips(schedule.num_stages)
    check(SkipRun(schedule, tuple(Skip(*p, KINDS[sum(p) % len(KINDS)]) for p in pairs)))


@rotated(num_cases=14, kind=KINDS, pair=possible_skips(NUM_STAGES), schedule=FOUR_STAGES)
def test_one_skip_of_each_kind(kind: str, pair: tuple[int, int], schedule: Schedule) -> None:
    check(SkipRun(schedule, (Skip(*pair, kind),)))


@rotated(last=range(2, 8) if IS_LONG else [2, 7], name=["1F1B", "ZB-H2"])
def test_skip_over_one_stage_and_more(last: int, name: str) -> None:
    schedule = schedules.get(name)(num_ranks=last + 1, num_microbatches=last + 2)
    check(SkipRun(schedule, (Skip(0, last, "two"),)))


# V: ranks 0 1 1 0. Loop: ranks 0 1 0 1.
SAME_RANK = [
    *((name, (0, 3)) for name in ("ZB-V", "DualPipeV", "V-Min")),
    *((name, pair) for name in ("Interleaved1F1B", "LoopedBFS") for pair in ((0, 2), (1, 3))),
]


@rotated(place={f"{name} {pair}": (name, pair) for name, pair in SAME_RANK}, kind=KINDS)
def test_skip_to_a_stage_of_the_same_rank(place: tuple[str, tuple[int, int]], kind: str) -> None:
    name, pair = place
    schedule = schedule_of(name, 2, 3)
    assert 1 == len({schedule.placement.ranks[stage] for stage in pair})
    check(SkipRun(schedule, (Skip(*pair, kind),)))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_one_rank_has_all_stages(name: str) -> None:
    schedule = make(schedules.get(name), Shape(1, 3, 4))
    check(SkipRun(schedule, random_skips(4, 0)))


SILENT = {
    "first": ((Skip(0, 2), Skip(0, 3)), (0,)),
    "second": ((Skip(0, 2), Skip(1, 3)), (1,)),
    "third": ((Skip(0, 3), Skip(1, 3)), (2,)),
    "third with a skip of its own": ((Skip(1, 4), Skip(2, 4)), (2,)),
    "first and second": ((Skip(0, 3), Skip(1, 3, "two"), Skip(0, 2)), (0, 1)),
    "all but the last": ((Skip(0, 4), Skip(1, 4), Skip(2, 4, "nested")), (0, 1, 2, 3)),
}


@rotated(case=list(SILENT), name=["1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V", "DualPipeV"])
def test_stage_that_gives_nothing_to_the_next_one(case: str, name: str) -> None:
    """The next one gets only what skipped stages, or nothing at all."""
    skips, silent = SILENT[case]
    num_ranks = 5 if schedules.get(name).stages_per_rank == 1 else 3
    check(SkipRun(schedule_of(name, num_ranks, 4), skips, silent))


@pytest.mark.parametrize("name", SOME_NAMES)
def test_step_and_eval_alternate(name: str) -> None:
    schedule = schedule_of(name, 4, 5)
    check(SkipRun(schedule, random_skips(schedule.num_stages, 1), evaluates=True))


def test_forward_only_schedule_evaluates() -> None:
    schedule = schedules.get("ForwardOnly")(num_ranks=4, num_microbatches=4)
    run = SkipRun(schedule, random_skips(4, 2))
    x, target = run.batch(0)

    def main(group: LocalGroup) -> Any:
        return make_skip_pipeline(group, run, run.modules()).step(x, target=target)

    *others, actual = penstock.local_ranks(4, main)
    assert [None] * 3 == others
    with torch.no_grad():
        assert_close("outputs", compute_unsplit(run.modules(), x), actual)


@pytest.mark.parametrize("name", SOME_NAMES)
def test_shapes_change_from_step_to_step(name: str) -> None:
    schedule = schedule_of(name, 4, 3)
    skips = random_skips(schedule.num_stages, 3)
    check(SkipRun(schedule, skips, is_dynamic=True, evaluates=True, num_steps=3))


@rotated(name=SOME_NAMES, is_even={"even": True, "uneven": False})
def test_batch_that_comes_in_microbatches(name: str, is_even: bool) -> None:
    schedule = schedule_of(name, 4, 3)
    skips = random_skips(schedule.num_stages, 4)
    check(SkipRun(schedule, skips, is_cut=True, is_even=is_even))


@pytest.mark.parametrize("name", SOME_NAMES)
def test_schedule_with_communication_of_its_own(name: str) -> None:
    schedule = Schedule.from_csv(add_comms(schedule_of(name, 4, 5)).to_csv())
    assert schedule.has_comms
    check(SkipRun(schedule, random_skips(schedule.num_stages, 5)))


def test_sends_that_are_late_and_not_in_the_order_of_their_forwards() -> None:
    """Rank 0 sends what skips stage 1 with each forward, and for stage 1 later and in reverse."""
    text = (
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B1,0RECV_B0,0B0,0B1\n"
        "1RECV_F1,1RECV_F0,1F1,2F1,1F0,2F0,2B0,2B1,1B0,1B1,1SEND_B1,1SEND_B0\n"
    )
    schedule = Schedule.from_csv(text)
    assert (0, 1, 1) == tuple(schedule.placement.ranks)
    for kind in KINDS:
        check(SkipRun(schedule, (Skip(0, 2, kind),)))


RANDOM = {
    str(seed): (seed, schedule)
    for seed in range(24 if IS_LONG else 10)
    if (schedule := random_schedule(seed)).num_stages > 2
}


@rotated(drawn=RANDOM, has_comms={"plain": False, "with sends": True})
def test_random_schedule_and_skips(drawn: tuple[int, Schedule], has_comms: bool) -> None:
    seed, plain = drawn
    schedule = add_comms(plain) if has_comms else plain
    check(SkipRun(schedule, random_skips(schedule.num_stages, seed), is_even=seed % 2 == 0))


class Call(nn.Module):
    """A function of its arguments and a layer, as a stage."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


Ends = dict[int, dict[str, Any]]


def run_calls(
    modules: list[nn.Module],
    schedule: Schedule,
    options: Ends,
    main: Callable[[Pipeline], Any],
    loss_fn: Callable[..., Tensor] = mean_square,
) -> list[Any]:
    """Call `main` with each rank's pipeline; `options` are those of stages, by their index."""

    def on_rank(group: LocalGroup) -> Any:
        stages = [
            PipelineStage(modules[s], s, len(modules), CPU, group=group, **options.get(s, {}))
            for s in schedule.placement.stages_of(group.rank)
        ]
        return main(Pipeline(stages, schedule, loss_fn=loss_fn))

    return penstock.local_ranks(schedule.num_ranks, on_rank)


FIRST_TO_LAST: Ends = {0: {"skips_out": {3: 1}}, 3: {"skips_in": {0: 1}}}


def first_to_last() -> list[nn.Module]:
    """Four stages; the last one takes what the first was given, too."""
    return [
        Call(lambda f, x: (torch.tanh(f(x)), x)),
        Call(lambda f, x: torch.tanh(f(x))),
        Call(lambda f, x: torch.tanh(f(x))),
        Call(lambda f, skipped, x: f(x) * skipped),
    ]


@every_schedule
def test_gradient_of_what_the_caller_gave_comes_by_both_ways(schedule: Schedule) -> None:
    modules, target = first_to_last(), randn(8, WIDTH)
    given = randn(8, WIDTH).requires_grad_()
    skipped, y = given.sin(), given.sin()
    for module in modules[:-1]:
        y = torch.tanh(module.layer(y))
    mean_square(modules[-1].layer(y) * skipped, target).backward()
    expected, given.grad = {"given": given.grad, **named_grads(dict(enumerate(modules)))}, None
    for module in modules:
        module.zero_grad()
    x = given.sin()
    run_calls(modules, schedule, FIRST_TO_LAST, lambda p: p.step(x, target=target))
    actual = {"given": given.grad, **named_grads(dict(enumerate(modules)))}
    assert_same_grads("step", expected, [actual])


@every_schedule
def test_examples_of_arguments_and_outputs_have_those_that_skip(schedule: Schedule) -> None:
    example = torch.empty(2, WIDTH, dtype=torch.float64, device="meta")
    options: Ends = {
        0: {"skips_out": {3: 1}, "output_args": (example, example)},
        3: {"skips_in": {0: 1}, "input_args": (example, example)},
    }
    modules, batch = first_to_last(), (randn(8, WIDTH), randn(8, WIDTH))
    run_calls(modules, schedule, options, lambda p: p.step(batch[0], target=batch[1]))
    assert all(param.grad is not None for m in modules for param in m.parameters())


@pytest.mark.parametrize(
    "first",
    [
        "forward",
        "backward",
    ],
)
def test_custom_function_may_run_the_halves_of_an_overlap_in_any_order(first: str) -> None:
    schedule = schedules.get("DualPipeV")(num_ranks=4, num_microbatches=10)
    run = SkipRun(schedule, tuple(Skip(*pair) for pair in possible_skips(8)))
    seen: list[Overlap] = []

    def halves(action: Overlap, context: ActionContext) -> None:
        seen.append(action)
        pair = [action.forward, action.backward]
        for half in pair if first == "forward" else reversed(pair):
            context.run(half)

    def main(group: LocalGroup) -> dict[str, Any]:
        modules = run.modules()
        pipeline = make_skip_pipeline(group, run, modules)
        pipeline.register_custom_function(Overlap, halves)
        x, target = run.batch(0)
        pipeline.step(x, target=target)
        return named_grads({index: modules[index] for index in pipeline.stages})

    ranks = penstock.local_ranks(4, main)
    assert seen
    assert_same_grads("step", train_skips_unsplit(run)[0].grads, ranks)


@rotated(kind=["step", "eval"], schedule=FOUR_STAGES)
def test_after_a_step_only_weights_gradients_inputs_and_outputs_are_alive(
    kind: str, schedule: Schedule
) -> None:
    run = SkipRun(schedule, (Skip(0, 2, "nested"), Skip(0, 3), Skip(1, 3, "unused")))
    modules, (x, target) = run.modules(), run.batch(0)
    before = live_tensors()

    def main(group: LocalGroup) -> tuple[Pipeline, Any]:
        pipeline = make_skip_pipeline(group, run, modules)
        for _ in range(3):
            outputs = getattr(pipeline, kind)(x, target=target)
        return pipeline, outputs  # The pipeline has to be alive when the tensors are counted.

    results = penstock.local_ranks(schedule.num_ranks, main)
    (outputs,) = (outputs for _, outputs in results if outputs is not None)
    known = [*before, *weights_and_grads(modules), outputs]
    assert [] == [tuple(tensor.shape) for tensor in live_tensors(but=known)]


# As in test_growth.py: one of these kept in each step would be 15 MB in the end.
ROWS, COLUMNS = 4096, 64
ROOM_BYTES = 10_000_000


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZB-V"] if IS_LONG else ["ZB-V"])
def test_many_steps_do_not_grow(name: str) -> None:
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=4)
    modules = first_to_last()
    for module in modules:
        module.layer = nn.Linear(COLUMNS, COLUMNS).double()
    x, target = randn(ROWS, COLUMNS), randn(ROWS, COLUMNS)

    def main(pipeline: Pipeline) -> tuple[int, int]:
        return growth_of(lambda: pipeline.step(x, target=target), num_steps=30, num_warm=10)

    for tensors, memory in run_calls(modules, schedule, FIRST_TO_LAST, main):
        assert 0 == tensors
        assert memory < ROOM_BYTES


def test_what_skipped_a_stage_is_released_when_its_gradient_comes_back() -> None:
    """1F1B on three ranks: before its k-th backward, rank 0 has sent k + 3 values to rank 2.

    Rank 2 sent gradient k after its forward k, so k + 1 of them have arrived, and two are under
    way. Rank 1 sent gradient k after its forward k + 1, so of its k + 3 one is.
    """
    m = 8
    held: list[list[int]] = []

    def count(action: Backward, context: Any) -> None:
        context.run(action)
        outboxes = context.mailbox._outboxes
        held.append([len({key for _, key, _, _ in outboxes[rank].sent}) for rank in (1, 2)])

    schedule = schedules.get("1F1B")(num_ranks=3, num_microbatches=m)
    run = SkipRun(schedule, (Skip(0, 2, "two"),))

    def main(group: LocalGroup) -> None:
        pipeline = make_skip_pipeline(group, run, run.modules())
        x, target = run.batch(0)
        pipeline.step(x, target=target)  # Later ones send no forms.
        if group.rank == 0:
            pipeline.register_custom_function(Backward, count)
        pipeline.step(x, target=target)

    penstock.local_ranks(3, main)
    expected = [[min(k + 3, m) - min(k + 2, m), min(k + 3, m) - (k + 1)] for k in range(m)]
    assert expected == held


class Watched(SkipStage):
    """Knows for each call what it was given and what it gave, but does not keep it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[weakref.ref[Tensor]]] = []

    def forward(self, *args: Any) -> Any:
        outputs = super().forward(*args)
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        taken = args if self.index else ()  # The batch is the caller's.
        self.seen.append([weakref.ref(tensor) for tensor in (*taken, *given)])
        return outputs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V"])
def test_values_that_skip_are_dropped_with_the_backward_of_their_microbatch(
    name: str, stage: int
) -> None:
    """At either end: the tensors of the stage itself, and what the outbox has of them."""
    m = 6
    schedule = schedule_of(name, 4 // schedules.get(name).stages_per_rank, m)
    run = SkipRun(schedule, (Skip(0, 2, "two"), Skip(0, 3), Skip(1, 3)))
    alive: dict[int, list[Message | torch.Size]] = {}

    def main(group: LocalGroup) -> None:
        modules = run.modules()
        module, order = Watched(stage, 4, run.skips, ()).double(), list[int]()
        modules[stage] = module

        def forward(action: Forward, context: ActionContext) -> None:
            context.run(action)
            if action.stage == stage:
                order.append(action.mb)

        def backward(action: Any, context: Any) -> None:
            context.run(action)
            if action.stage != stage:
                return
            sent = [
                key for outbox in context.mailbox._outboxes.values() for _, key, _, _ in outbox.sent
            ]
            keys = [Message(stage, target, action.mb) for target in module.targets]
            alive[action.mb] = [key for key in keys if key in sent]
            if not isinstance(action, BackwardInput):
                seen = module.seen[order.index(action.mb)]
                alive[action.mb] += [x.shape for ref in seen if (x := ref()) is not None]

        pipeline = make_skip_pipeline(group, run, modules)
        pipeline.register_custom_function(Forward, forward)
        for kind in (Backward, BackwardInput, BackwardWeight):
            pipeline.register_custom_function(kind, backward)
        x, target = run.batch(0)
        pipeline.step(x, target=target, return_outputs=False)

    penstock.local_ranks(schedule.num_ranks, main)
    assert {mb: [] for mb in range(m)} == alive
