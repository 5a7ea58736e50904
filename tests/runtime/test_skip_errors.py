"""What is refused of values that skip stages, and where a step says that it waits for one."""

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from failing_steps import Boom, Layer, assert_rejected, errors_of, raise_at
from test_skips import Call, run_calls
from torch import Tensor, nn

from local_steps import FOUR_STAGES, randn
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, local_ranks, schedules
from penstock.errors import AgreementError, PipeliningShapeError, StageError
from penstock.ir import Backward, Skip
from penstock.passes import add_sends
from skip_models import WIDTH
from stage_training import CPU

V = FOUR_STAGES["ZB-V"]  # Ranks 0 1 1 0.
ONE_F_ONE_B = FOUR_STAGES["1F1B"]


def _make(stage: int, num_stages: int, **skips: Any) -> Callable[[LocalGroup], PipelineStage]:
    module = nn.Linear(4, 4)
    return lambda group: PipelineStage(module, stage, num_stages, CPU, group=group, **skips)


REFUSED = [
    # stage, which, what was given, what was expected
    (0, "skips_out", {1: 1}, "from 2 to 5"),  # The next one.
    (0, "skips_out", {0: 1}, "from 2 to 5"),  # Itself.
    (2, "skips_out", {0: 1}, "from 4 to 5"),  # One before.
    (2, "skips_out", {1: 1}, "from 4 to 5"),
    (2, "skips_out", {3: 1}, "from 4 to 5"),
    (3, "skips_out", {5: 1, 6: 1}, "from 5 to 5"),  # There is none.
    (0, "skips_out", {-1: 1}, "from 2 to 5"),
    (0, "skips_out", {2: 0}, "from 2 to 5"),
    (0, "skips_out", {2: 1, 3: -1}, "from 2 to 5"),
    (0, "skips_out", {2: 1.0}, "from 2 to 5"),
    (0, "skips_out", {2: None}, "from 2 to 5"),
    (0, "skips_out", {"2": 1}, "from 2 to 5"),
    (4, "skips_out", {5: 1}, "it has none"),
    (5, "skips_out", {0: 1}, "it has none"),
    (5, "skips_in", {4: 1}, "from 0 to 3"),  # The one before.
    (5, "skips_in", {5: 1}, "from 0 to 3"),
    (3, "skips_in", {5: 1}, "from 0 to 1"),  # One after.
    (3, "skips_in", {4: 1}, "from 0 to 1"),
    (3, "skips_in", {2: 1}, "from 0 to 1"),
    (3, "skips_in", {-1: 1}, "from 0 to 1"),
    (3, "skips_in", {1: 0}, "from 0 to 1"),
    (3, "skips_in", {1: -2}, "from 0 to 1"),
    (3, "skips_in", {1: "1"}, "from 0 to 1"),
    (2, "skips_in", {0: 1, 1: 1}, "from 0 to 0"),
    (1, "skips_in", {0: 1}, "it has none"),
    (0, "skips_in", {2: 1}, "it has none"),
]


@pytest.mark.parametrize(("stage", "name", "skips", "expected"), REFUSED)
def test_stages_or_counts_that_cannot_be(
    stage: int, name: str, skips: dict[Any, Any], expected: str
) -> None:
    message = (
        f"stage {stage}: {name} is {skips}. Expected numbers of values, at least 1, for stages "
        f"that are not neighbours: {expected}."
    )
    assert_rejected(StageError, message, _make(stage, 6, **{name: skips}))


@pytest.mark.parametrize("name", ["skips_in", "skips_out"])
@pytest.mark.parametrize("skips", [[3], 3, (0,)])
def test_skips_that_are_no_mapping(name: str, skips: Any) -> None:
    with pytest.raises(StageError, match=f"{name} is {re.escape(repr(skips))}"):
        local_ranks(1, _make(3, 6, **{name: skips}))


def _too_few(count: int, returned: Callable[[Tensor], Any], kind: str) -> Callable[..., None]:
    """The first stage is to send `count` values to the last one, of those that it returns."""

    def run() -> None:
        modules = [
            Call(lambda f, x: returned(f(x))),
            *(Call(lambda f, *args: f(args[-1])) for _ in range(3)),
        ]
        ends = {0: {"skips_out": {3: count}}, 3: {"skips_in": {0: count}}}
        x, target = randn(8, WIDTH), randn(8, WIDTH)
        run_calls(modules, ONE_F_ONE_B, ends, lambda p: getattr(p, kind)(x, target=target))

    return run


@pytest.mark.parametrize("kind", ["step", "eval"])
@pytest.mark.parametrize(
    ("count", "returned", "found"),
    [
        (2, lambda y: y, 1),
        (2, lambda y: (y,), 1),
        (3, lambda y: [y, y], 2),
        (1, lambda y: (), 0),
        (2, lambda y: {"a": y, "b": y}, 1),
    ],
    ids=["bare", "tuple", "list", "nothing", "dict"],
)
def test_too_few_outputs(count: int, returned: Any, found: int, kind: str) -> None:
    message = (
        f"stage 0, microbatch 0: {found} outputs, but skips_out takes {count}. Let the module "
        "return a tuple that ends with them."
    )
    with pytest.raises(PipeliningShapeError) as caught:
        _too_few(count, returned, kind)()
    assert message == str(caught.value)
    assert ["in 0F0 (forward of microbatch 0 on stage 0), on rank 0"] == caught.value.__notes__


def test_counts_of_all_targets_are_needed() -> None:
    modules = [
        Call(lambda f, x: (f(x), x)),
        *(Call(lambda f, *args: f(args[-1])) for _ in range(3)),
    ]
    ends = {
        0: {"skips_out": {3: 2, 2: 1}},
        2: {"skips_in": {0: 1}},
        3: {"skips_in": {0: 2}},
    }
    with pytest.raises(PipeliningShapeError, match="0: 2 outputs, but skips_out takes 3"):
        run_calls(modules, ONE_F_ONE_B, ends, lambda p: p.step(randn(8, WIDTH)))


def _disagreement(source: int, target: int, ranks: tuple[int, int], counts: tuple[int, int]) -> str:
    return (
        f"stage {source} on rank {ranks[0]} sends {counts[0]} values to stage {target}, but stage "
        f"{target} on rank {ranks[1]} takes {counts[1]} from it. Expected the same number: give "
        "skips_out and skips_in of the same cut."
    )


def _step_with(schedule: Schedule, ends: dict[int, dict[str, Any]], kind: str = "step") -> None:
    modules: list[nn.Module] = [Call(lambda f, *args: (f(args[-1]),) * 4) for _ in range(4)]
    x = randn(8, WIDTH)
    loss_fn = lambda outputs, target: outputs[0].sum()  # noqa: E731
    run_calls(modules, schedule, ends, lambda p: getattr(p, kind)(x), loss_fn)


@pytest.mark.parametrize("kind", ["step", "eval"])
@pytest.mark.parametrize(
    ("ends", "pair", "counts"),
    [
        ({0: {"skips_out": {2: 1}}}, (0, 2), (1, 0)),
        ({2: {"skips_in": {0: 1}}}, (0, 2), (0, 1)),
        ({1: {"skips_out": {3: 1}}, 3: {"skips_in": {1: 2}}}, (1, 3), (1, 2)),
        ({0: {"skips_out": {2: 1}}, 3: {"skips_in": {0: 1}}}, (0, 2), (1, 0)),
    ],
)
@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_ends_that_disagree(
    name: str, ends: Any, pair: tuple[int, int], counts: tuple[int, int], kind: str
) -> None:
    schedule = FOUR_STAGES[name]
    ranks = schedule.placement.ranks[pair[0]], schedule.placement.ranks[pair[1]]
    with pytest.raises(AgreementError) as caught:
        _step_with(schedule, ends, kind)
    assert _disagreement(*pair, ranks, counts) == str(caught.value)


def test_every_rank_is_told_of_ends_that_disagree() -> None:
    def main(group: LocalGroup) -> None:
        skips = {"skips_out": {2: 1}} if group.rank == 0 else {}
        stage = PipelineStage(nn.Linear(4, 4), group.rank, 3, CPU, group=group, **skips)
        Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=nn.functional.mse_loss).step()

    assert [AgreementError] * 3 == [type(error) for error in errors_of(3, main)]


@pytest.mark.parametrize(
    ("ends", "counts"),
    [
        ({0: {"skips_out": {3: 1}}}, (1, 0)),
        ({3: {"skips_in": {0: 1}}}, (0, 1)),
        ({0: {"skips_out": {3: 2}}, 3: {"skips_in": {0: 1}}}, (2, 1)),
    ],
    ids=["only out", "only in", "counts"],
)
def test_ends_on_the_same_rank_that_disagree(ends: Any, counts: tuple[int, int]) -> None:
    assert V.placement.ranks[0] == V.placement.ranks[3]
    with pytest.raises(AgreementError) as caught:
        _step_with(V, ends)
    assert _disagreement(0, 3, (0, 0), counts) == str(caught.value)


def test_schedule_that_sends_what_no_stage_gives_is_rejected() -> None:
    schedule = add_sends(ONE_F_ONE_B, [Skip(0, 2)])
    message = (
        "the schedule sends values from stage 0 to stage 2, but no stage was made with this skip. "
        "Remove the schedule's sends with remove_comms: the pipeline adds those for the skips that "
        "its stages have."
    )
    with pytest.raises(AgreementError) as caught:
        _step_with(schedule, {})
    assert message == str(caught.value)


def test_rank_that_waits_for_what_skips_says_so() -> None:
    """It waits for this before what comes from the stage before it."""
    ends = {0: {"skips_out": {3: 1}}, 3: {"skips_in": {0: 1}}}

    def main(group: LocalGroup) -> None:
        module = Layer(raise_at(1) if group.rank == 0 else None)
        stage = PipelineStage(module, group.rank, 4, CPU, group=group, **ends.get(group.rank, {}))
        schedule = schedules.get("1F1B")(num_ranks=4, num_microbatches=2)
        Pipeline(stage, schedule, loss_fn=nn.functional.mse_loss).step(
            torch.ones(4, 4), target=torch.ones(4, 4)
        )

    failed, *_, last = errors_of(4, main)
    assert Boom is type(failed)
    expected = "the activation of microbatch 0 for stage 3 from stage 0 on rank 0, because rank 0"
    assert expected in str(last)


def test_words_for_a_gradient_of_what_skipped() -> None:
    ends = {0: {"skips_out": {2: 1}}, 2: {"skips_in": {0: 1}}}
    described: list[str] = []

    def main(group: LocalGroup) -> None:
        module = Call((lambda f, x: (f(x), x)) if group.rank == 0 else lambda f, *a: f(a[-1]))
        stage = PipelineStage(module, group.rank, 3, CPU, group=group, **ends.get(group.rank, {}))
        pipeline = Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=nn.functional.mse_loss)

        def describe(action: Backward, context: Any) -> None:
            (entry,) = (e for e in context.program.entries if e.action == action)
            for message in filter(attrgetter("skip"), entry.tasks[0].needs):
                described.append(context.mailbox._describe_receive(message))
            for message in filter(attrgetter("skip"), entry.tasks[0].makes):
                described.append(context.mailbox._describe_send(message))
            context.run(action)

        pipeline.register_custom_function(Backward, describe)
        pipeline.step(randn(2, WIDTH), target=randn(2, WIDTH))

    local_ranks(3, main)
    assert {
        *(f"the gradient of microbatch {mb} for stage 0 from stage 2 on rank 2" for mb in (0, 1)),
        *(
            f"stage 0 on rank 0 to take the gradient of microbatch {mb} from stage 2"
            for mb in (0, 1)
        ),
    } == set(described)


@pytest.mark.parametrize("kind", ["shape", "structure"])
def test_value_that_changes_its_form_is_named_by_its_stage(kind: str) -> None:
    calls: list[int] = []

    def give(f: nn.Module, x: Tensor) -> Any:
        calls.append(1)
        if len(calls) <= 4:
            return f(x), x
        return (f(x), x[:, :2]) if kind == "shape" else (f(x), [x])

    modules: list[nn.Module] = [
        Call(give),
        *(Call(lambda f, *args: f(args[-1])) for _ in range(3)),
    ]
    ends = {0: {"skips_out": {2: 1}}, 2: {"skips_in": {0: 1}}}
    x, target = randn(8, WIDTH), randn(8, WIDTH)

    def main(pipeline: Pipeline) -> None:
        for _ in range(2):
            pipeline.step(x, target=target)

    with pytest.raises(PipeliningShapeError, match=rf"stage 0, microbatch 0: .*{kind} mismatch"):
        run_calls(modules, ONE_F_ONE_B, ends, main)
