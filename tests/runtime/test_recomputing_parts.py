"""Forwards of which some parts run again before their backwards, to the last bit.

The rest of a stage keeps what its backward needs.
"""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing import rotated
from local_steps import (
    FOUR_STAGES,
    NUM_STAGES,
    WIDTH,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
)
from penstock import (
    LocalGroup,
    Pipeline,
    PipelineStage,
    Schedule,
    cut_between_modules,
    local_ranks,
    schedules,
)
from penstock.compat import PipelineStage as DropInStage
from penstock.compat import Schedule1F1B
from penstock.errors import StageError
from recomputed_steps import assert_same_bits, recomputed, train
from repeated_blocks import BLOCKS, Block, autocast_inside, in_place, popping
from stage_training import TRAINING_NAMES, Run, make_stages
from staged_models import MODELS, Batch, MLPStage, named_grads

KINDS = ["all", "some", "early"]
ONE_STAGE = Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1\n")


class Around(nn.Module):
    """A stage with a part in its middle; `use` calls it, if it is not called as usual."""

    def __init__(self, inner: nn.Module, use: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.last = nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        h = self.first(x).tanh()
        h = self.inner(h, **kwargs) if self.use is None else self.use(self, h, **kwargs)
        return x + self.last(h)


def stages_around(
    block: nn.Module, use: Callable[..., Any] | None = None, others: Any = MLPStage
) -> list[nn.Module]:
    """One that a case is about: ranks of one process share what they draw from."""
    modules = [Around(others()) for _ in range(NUM_STAGES)]
    modules[1] = Around(block, use)
    return [module.double() for module in modules]


def check(
    modules: list[nn.Module],
    schedule: Schedule,
    parts: list[str],
    kind: str,
    batch: Batch | None = None,
    **options: Any,
) -> None:
    batch = batch or mlp_batch()
    given = {"recomputed": parts, **options.pop("stage_options", {})}
    expected = train(modules, schedule, batch, **options)
    again = recomputed(schedule)[kind]
    assert_same_bits(expected, train(modules, again, batch, stage_options=given, **options))


PARTS = {
    "mlp": ["up", "norm"],
    "transformer": ["attention", "mlp.0", "mlp.1"],
}


@rotated(name=TRAINING_NAMES, model=PARTS, kind=KINDS)
def test_registered_schedule_gives_the_same(name: str, model: list[str], kind: str) -> None:
    which = next(key for key, parts in PARTS.items() if parts == model)
    run, made = Run(which, name, 2), MODELS[which]
    schedule = schedules.get(name)(num_ranks=2, num_microbatches=run.shape.m)
    modules = [made.stage(index, run.num_stages) for index in range(run.num_stages)]
    batch = made.batch(run.batch_size, 0)
    check(modules, schedule, model, kind, batch, loss_fn=made.loss_fn(run.reduction))


@rotated(
    block=BLOCKS,
    schedule=FOUR_STAGES,
    kind=KINDS,
    parts=[["inner"], ["inner", "last"], ["first", "inner"], ["first", "inner", "last"]],
)
def test_part_gives_and_changes_the_same(
    block: Callable[[], Block], schedule: Schedule, kind: str, parts: list[str]
) -> None:
    random.seed(0)
    np.random.seed(0)
    states = random.getstate(), np.random.get_state()
    modules, batch = stages_around(block()), mlp_batch()
    expected = train(modules, schedule, batch)
    random.setstate(states[0])
    np.random.set_state(states[1])
    options = {"stage_options": {"recomputed": parts}}
    assert_same_bits(expected, train(modules, recomputed(schedule)[kind], batch, **options))


def changing_its_input(block: Block, x: Tensor) -> Tensor:
    return block.layer(x.mul_(2).sigmoid_())


def on_a_sum(stage: Around, h: Tensor) -> Tensor:
    return stage.inner(h + 1)  # type: ignore[no-any-return]


def several_outputs(block: Block, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
    return {"one": block.layer(x) * scale, "others": (x.tanh(), 2)}


def using_outputs(stage: Around, h: Tensor) -> Tensor:
    found = stage.inner(x=h, scale=h.detach().exp())
    one, *_ = found["others"]
    return found["one"] * one * found["others"][1]  # type: ignore[no-any-return]


def twice(stage: Around, h: Tensor) -> Tensor:
    return stage.inner(stage.inner(h)) + stage.inner(h)  # type: ignore[no-any-return]


def calling_itself(block: Block, x: Tensor, depth: int = 2) -> Tensor:
    return block.layer(x).sin() if depth == 0 else block(x.tanh(), depth=depth - 1) * 2  # type: ignore[no-any-return]


def without_graph(stage: Around, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = stage.inner(h)
    return stage.inner(h) * scale  # type: ignore[no-any-return]


def in_autocast(stage: Around, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = stage.inner(h.float())
    return found.to(h.dtype)


def product(block: Block, x: Tensor) -> Tensor:
    return block.layer(x).sin()


def reading_views(stage: Around, h: Tensor) -> Tensor:
    left, right = h.chunk(2, dim=-1)
    return stage.inner(torch.cat([right, left], -1).t().contiguous().t())  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[], list[nn.Module]]] = {
    "changed input": lambda: stages_around(Block(changing_its_input), on_a_sum),
    "several outputs": lambda: stages_around(Block(several_outputs), using_outputs),
    "twice": lambda: stages_around(BLOCKS["dropout"](), twice),
    "recursive": lambda: stages_around(Block(calling_itself)),
    "without a graph": lambda: stages_around(BLOCKS["batch norm"](), without_graph),
    "views": lambda: stages_around(Block(product), reading_views),
    "linear": lambda: stages_around(nn.Linear(WIDTH, WIDTH)),
    "frozen": lambda: stages_around(nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
}


@rotated(call=CALLS, schedule=FOUR_STAGES, kind=KINDS)
def test_calls_of_a_part_give_the_same(
    call: Callable[[], list[nn.Module]], schedule: Schedule, kind: str
) -> None:
    check(call(), schedule, ["inner"], kind)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_weight_that_parts_and_others_share(schedule: Schedule, kind: str) -> None:
    modules = [Around(nn.Linear(WIDTH, WIDTH)).double() for _ in range(NUM_STAGES)]
    for module in modules:
        module.inner.weight = module.first.weight  # type: ignore[union-attr, assignment]
    check([*modules], schedule, ["inner"], kind)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_part_with_two_names_runs_again_once(schedule: Schedule, kind: str) -> None:
    modules = [Around(nn.Linear(WIDTH, WIDTH)).double() for _ in range(NUM_STAGES)]
    for module in modules:
        module.last = module.inner  # type: ignore[assignment]
    check([*modules], schedule, ["inner", "last"], kind)


@rotated(schedule=FOUR_STAGES, kind=KINDS, where=["around", "inside", "in the part"])
def test_autocast(schedule: Schedule, kind: str, where: str) -> None:
    inner = Block(autocast_inside if where == "in the part" else product)
    modules = stages_around(inner, in_autocast if where == "inside" else None)
    modules = [module.float() for module in modules]
    batch = Batch((torch.randn(8, WIDTH),), {}, torch.randn(8, WIDTH))

    def around(step: Callable[[], Any]) -> Any:
        is_on = where == "around"
        with torch.autocast("cpu", dtype=torch.bfloat16) if is_on else nullcontext():
            return step()

    check(modules, schedule, ["inner", "first"], kind, batch, around=around)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_arguments_that_a_part_changes_are_changed_once(schedule: Schedule, kind: str) -> None:
    modules: list[nn.Module] = [Around(Block(in_place)).double() for _ in range(NUM_STAGES)]
    batch = Batch((randn(8, WIDTH),), {"mask": randn(8, WIDTH)}, randn(8, WIDTH))
    check(modules, schedule, ["inner"], kind, batch)


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_list_that_a_part_empties_is_full_again(schedule: Schedule, kind: str) -> None:
    def popping_a_copy(stage: Around, h: Tensor, scales: list[Tensor]) -> Any:
        return stage.inner(h, scales=list(scales))

    modules: list[nn.Module] = [
        Around(Block(popping), popping_a_copy).double() for _ in range(NUM_STAGES)
    ]
    batch = Batch((randn(8, WIDTH),), {"scales": [randn(8, WIDTH) for _ in range(3)]}, None)
    check(modules, schedule, ["inner"], kind, batch, loss_fn=lambda y, _: y.square().sum())


@rotated(schedule=FOUR_STAGES, kind=KINDS)
def test_microbatches_that_differ(schedule: Schedule, kind: str) -> None:
    batch = Batch((randn(9, WIDTH),), {}, randn(9, WIDTH))
    options = {"stage_options": {"dynamic_shapes": True}, "loss_weight": lambda target: len(target)}
    check(stages_around(BLOCKS["dropout"]()), schedule, ["inner"], kind, batch, **options)


def step_alone(
    module: nn.Module, *parts: str, schedule: Schedule = ONE_STAGE, **options: Any
) -> list[Any]:
    """One step of a single stage whose parts are recomputed."""
    batch = mlp_batch(4)

    def main(pipeline: Pipeline) -> list[int]:
        pipeline.step(batch.args[0], target=batch.target)
        return []

    given = {"recomputed": parts}
    return run_locally([module.double()], schedule, main, stage_options=given, **options)


def test_only_a_part_is_called_twice() -> None:
    calls: list[str] = []
    module = Around(MLPStage())
    for name in ("first", "inner", "inner.up", "last"):
        module.get_submodule(name).register_forward_hook(
            lambda *_, name=name: calls.append(name)  # type: ignore[misc]
        )
    step_alone(module, "inner")
    forward, again = ["first", "inner.up", "inner", "last"], ["inner.up", "inner"]
    assert [*forward, *forward, *again, *again] == calls


def test_modules_are_left_as_they_were() -> None:
    module = Around(MLPStage())
    before = {name: set(vars(part)) for name, part in module.named_modules()}
    step_alone(module, "first", "inner")
    assert before == {name: set(vars(part)) for name, part in module.named_modules()}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("inner", r"recomputed is 'inner'\. Expected names of submodules, at least one"),
        ([], r"recomputed is \[\]\. .* Leave it out to recompute the whole stage"),
        ([1], r"recomputed is \[1\]\. Expected names"),
        (["iner"], r"names 'iner', which is not a submodule\. .* the closest are \['inner'"),
        ([""], r"names '', which is not a submodule"),
        (["inner.up", "inner"], r"'inner.up', which is inside of 'inner', which it names too"),
    ],
)
def test_names_that_no_part_has_are_refused(names: Any, text: str) -> None:
    def main(group: LocalGroup) -> None:
        with pytest.raises(
            StageError, match=f"stage 0: recomputed .*{text.removeprefix('recomputed ')}"
        ):
            PipelineStage(Around(MLPStage()), 0, 1, "cpu", group=group, recomputed=names)

    local_ranks(1, main)


def test_part_of_a_compiled_module_is_refused() -> None:
    module = Around(MLPStage())
    module.inner.compile(backend="aot_eager")
    with pytest.raises(StageError, match=r"'inner.up', which is inside of a compiled module"):
        step_alone(module, "inner.up")


def test_part_of_a_traced_stage_is_refused() -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    with pytest.raises(StageError, match=r"'0', but the stage was traced, and its graph has the"):
        step_alone(module, "0")
    step_alone(module, "0.0")


def test_part_that_a_forward_does_not_call_is_refused() -> None:
    def by_hand(stage: Around, h: Tensor) -> Tensor:
        return nn.functional.linear(h, stage.inner.weight)  # type: ignore[arg-type]

    module = Around(nn.Linear(WIDTH, WIDTH), by_hand)
    with pytest.raises(
        StageError,
        match=r"stage 0, microbatch 0: recomputed names \['inner'\], which the forward did not",
    ):
        step_alone(module, "first", "inner")


def test_part_in_a_checkpoint_is_refused() -> None:
    def checkpointing(stage: Around, h: Tensor) -> Any:
        return checkpoint(stage.inner, h, use_reentrant=False)

    with pytest.raises(
        StageError, match=r"stage 0, part 'inner', microbatch 0: the part is called where hooks"
    ):
        step_alone(Around(MLPStage(), checkpointing), "inner")


class Flag:
    """State outside of modules, which forwards change."""

    def __init__(self, function: Callable[[int, Tensor], Tensor]) -> None:
        self.calls = 0
        self.function = function

    def __call__(self, block: Block, x: Tensor) -> Tensor:
        self.calls += 1
        return self.function(self.calls, block.layer(x))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda calls, x: x.sin() if calls > 2 else x * 2,
            r"saves .*, where the first saved None",
        ),
        (
            lambda calls, x: x * 2 if calls > 2 else x.sin(),
            r"saves nothing, where the first saved a tensor of shape \(2, 6\) and torch.float64",
        ),
        (
            lambda calls, x: x[:1].sin() if calls > 2 else x.sin()[:1],
            r"saves .*, where the first saved a tensor of shape \(2, 6\)",
        ),
    ],
    ids=["more", "fewer", "others"],
)
def test_part_that_computes_something_else_is_refused(
    function: Callable[[int, Tensor], Tensor], text: str
) -> None:
    module = Around(Block(Flag(function)))
    place = "stage 0, part 'inner', microbatch 0: the second run of the forward"
    with pytest.raises(StageError, match=f"{place} {text}"):
        step_alone(module, "inner")


def test_saved_tensor_that_the_part_changes_is_refused() -> None:
    def overwriting(block: Block, x: Tensor) -> Tensor:
        y = block.layer(x).tanh()
        y.mul_(2)
        return y

    with pytest.raises(
        StageError, match=r"part 'inner', microbatch 0: a tensor that the backward needs, .* was"
    ):
        step_alone(Around(Block(overwriting)), "inner")


def test_input_that_others_change_before_the_recomputation_is_refused() -> None:
    def adding(stage: Around, h: Tensor) -> Tensor:
        return h.add_(nn.functional.dropout(stage.inner(h)))

    with pytest.raises(
        StageError, match=r"part 'inner', microbatch 0: an input .* was changed in place between"
    ):
        step_alone(Around(nn.Identity(), adding), "inner")


def test_gradients_in_a_part_are_refused() -> None:
    def with_gradients(block: Block, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(block.layer(own).square().sum(), own)
        return x + grad

    with pytest.raises(StageError, match="the forward computes gradients, so it needs what"):
        step_alone(Around(Block(with_gradients)), "inner")


@pytest.mark.parametrize("parts", [("inner",), None])
def test_torch_func_where_nothing_is_kept_is_refused(parts: tuple[str, ...] | None) -> None:
    def with_transform(block: Block, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda own: block.layer(own).square().sum())(x)

    batch, module = mlp_batch(4), Around(Block(with_transform)).double()
    with pytest.raises(StageError, match=r"the forward computes gradients by torch\.func, such as"):
        run_locally(
            [module],
            ONE_STAGE,
            lambda pipeline: pipeline.step(batch.args[0], target=batch.target),
            stage_options={"recomputed": parts},
        )
    other = {"recomputed": ["first"]}
    run_locally(
        [module],
        ONE_STAGE,
        lambda pipeline: pipeline.step(batch.args[0], target=batch.target),
        stage_options=other,
    )


def test_drop_in_schedules_refuse_stages_with_recomputed_parts() -> None:
    """Their actions are torch's, so that they would never recompute them."""

    def main(group: LocalGroup) -> None:
        stage = DropInStage(mlp(1)[0], 0, 1, "cpu", group=group, recomputed=["up"])
        with pytest.raises(StageError, match=r"stage 0 has recomputed=\('up',\), but Schedule1F1B"):
            Schedule1F1B(stage, 2, loss_fn=mean_square)

    local_ranks(1, main)


def test_copy_of_a_stage_recomputes_the_same_parts() -> None:
    def main(group: LocalGroup) -> None:
        (stage,) = make_stages(group, mlp(1), [0], recomputed=["up"])
        assert ("up",) == copy.copy(stage).recomputed

    local_ranks(1, main)


def test_stages_of_a_cut_model_recompute_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*mlp(4))
    schedule, batch = FOUR_STAGES["ZB-V"], mlp_batch()
    calls: list[str] = []

    def main(group: LocalGroup, one: Schedule, parts: list[str]) -> dict[int, Any]:
        pieces = cut_between_modules(copy.deepcopy(model), one.num_stages)
        stages = [
            pieces.build_stage(index, "cpu", group, recomputed=[parts[index]])
            for index in one.placement.stages_of(group.rank)
        ]
        for stage in stages:
            part = stage.submod.get_submodule(parts[stage.stage_index])
            part.register_forward_hook(lambda *_: calls.append(""))
        Pipeline(stages, one, loss_fn=mean_square).step(batch.args[0], target=batch.target)
        return {stage.stage_index: named_grads({0: stage.submod}) for stage in stages}

    parts = [f"{index}.norm" for index in range(4)]
    expected = local_ranks(2, main, schedule, parts)
    assert 4 * 4 == len(calls)
    assert_same_bits(expected, local_ranks(2, main, recomputed(schedule)["all"], parts))
    assert 3 * 4 * 4 == len(calls)
