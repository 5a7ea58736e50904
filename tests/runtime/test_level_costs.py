"""Memory levels of real stages: measured, planned with, and run."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from interpreted_code import interpret
from local_steps import assert_same, mean_square, mlp, mlp_batch, step_locally, step_unsplit
from penstock import CostTable, LocalGroup, local_ranks, simulate
from penstock.compiling.split_backend import SplitBackend
from penstock.costs import Level
from penstock.errors import AgreementError, CostError
from penstock.torch_private.compiler import compile_in_place
from stage_training import make_stages
from staged_models import Batch

# torch's compiler causes it itself, where a module is given a tensor that is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, BUDGETS = 16, (1.0, 0.5, 0.0)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Let torch forget what it has compiled, before it refuses to compile more."""
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Has much that can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]  # untyped


def make_modules() -> list[nn.Module]:
    """Two stages: the first is twice as large."""
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()).double(), nn.Sequential(Block()).double()]


def compiled(budgets: tuple[Level, ...]) -> list[nn.Module]:
    """The same modules, compiled with a memory budget each."""
    modules = make_modules()
    for module, budget in zip(modules, budgets, strict=True):
        compile_in_place(module, backend=SplitBackend((), float(budget), interpret), dynamic=False)
    return modules


def block_batch() -> Batch:
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    return Batch((x,), {}, target)


def measure_levels(levels: Any = BUDGETS) -> dict[Level, CostTable]:
    modules = {level: compiled((level, level)) for level in levels}
    batch = block_batch()

    def main(group: LocalGroup) -> dict[Level, CostTable]:
        return penstock.measure_memory_levels(
            lambda level: make_stages(group, modules[level], [group.rank]),
            levels,
            4,
            mean_square,
            *batch.args,
            target=batch.target,
            repeats=1,
        )

    first, second = local_ranks(2, main)
    assert first == second
    return first


def test_stages_hold_less_after_a_forward_at_each_smaller_budget() -> None:
    tables = measure_levels()
    assert [*BUDGETS] == [*tables]
    most, half, least = (table.after_forward for table in tables.values())
    for stage in range(2):
        assert most[stage] > half[stage] > least[stage] > 0
        assert half[stage] <= 0.7 * most[stage]


def test_gradients_are_equal_at_each_budget() -> None:
    """Interpreted code computes again with the same operations: equal to the last bit."""
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4)
    batch = block_batch()
    records = [step_locally(compiled((budget,) * 2), schedule, batch) for budget in BUDGETS]
    for record in records[1:]:
        for name, grad in records[0].grads.items():
            other = record.grads[name]
            assert grad is not None
            assert other is not None
            assert torch.equal(grad, other)
    assert_same(step_unsplit(make_modules(), batch), records[-1])


def test_planned_mix_trains_within_the_cap() -> None:
    tables = {
        # Memory is the same in every run, but times are not: these are not measured.
        level: replace(
            table,
            forward=(1.0, 1.0),
            backward_input=(again, again),
            backward_weight=(1.0, 1.0),
            backward=(again + 1, again + 1),
            delay=(0.0,),
        )
        for (level, table), again in zip(measure_levels().items(), (1.0, 1.5, 2.0), strict=True)
    }
    # Between the levels of the first stage, which does not fit as it is: the second does.
    cap = tables[1.0].after_forward[0] * 0.9
    row = penstock.plan(tables, 2, batch=8, mb_size=2, microbatches=4, memory=cap, effort=0.1).best
    assert (0.0, 1.0) == row.levels
    batch, modules = block_batch(), compiled(row.levels)

    def main(group: LocalGroup) -> CostTable:
        stages = make_stages(group, modules, [group.rank])
        return penstock.measure_costs(
            stages, 4, mean_square, *batch.args, target=batch.target, repeats=1
        )

    measured, _ = local_ranks(2, main)
    assert row.costs.after_forward == measured.after_forward
    assert simulate(row.schedule, measured).peak_memory <= cap
    expected = step_unsplit(make_modules(), batch)
    assert_same(expected, step_locally(modules, row.schedule, batch))


def test_stages_of_a_level_are_made_when_its_turn_comes(caplog: pytest.LogCaptureFixture) -> None:
    modules, batch, made = mlp(2), mlp_batch(), []

    def main(group: LocalGroup) -> dict[Level, CostTable]:
        def make(level: str) -> Any:
            if group.rank == 0:
                made.append((level, len(caplog.messages)))
            return make_stages(group, modules, [group.rank])

        given = {"target": batch.target, "repeats": 1}
        return penstock.measure_memory_levels(
            make, iter(["a", "b"]), 4, mean_square, *batch.args, **given
        )

    with caplog.at_level(logging.INFO, logger="penstock"):
        tables, _ = local_ranks(2, main)
    assert ["a", "b"] == [*tables]
    assert [("a", 0), ("b", 1)] == made
    expected = ["measuring level 'a' of ['a', 'b']", "measuring level 'b' of ['a', 'b']"]
    assert expected == caplog.messages


def measure_plainly(levels: Any, num_stages: int = 1, **options: Any) -> None:
    """Measure without compiling; `levels` may be a function of the rank."""
    batch = mlp_batch()

    def main(group: LocalGroup) -> None:
        own = levels(group.rank) if callable(levels) else levels
        modules = mlp(num_stages)
        penstock.measure_memory_levels(
            lambda level: make_stages(group, modules, [group.rank]),
            own,
            4,
            mean_square,
            *batch.args,
            target=batch.target,
            **options,
        )

    local_ranks(num_stages, main)


@pytest.mark.parametrize(
    ("levels", "options", "message"),
    [
        ([], {}, "levels is empty. Give at least one level, such as a memory budget."),
        ([0.5, 0.5], {}, "levels holds 0.5 twice. Give each level once."),
        ([None], {}, "levels holds None. Expected numbers or texts."),
        ([0.5], {"repeats": 0}, "repeats is 0. Expected a whole number, at least 1."),
    ],
)
def test_wrong_levels_are_refused(levels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CostError, match=message):
        measure_plainly(levels, **options)


def test_ranks_that_disagree_on_the_levels_are_refused() -> None:
    def levels(rank: int) -> list[float]:
        return [1.0, 0.5] if rank else [1.0]

    with pytest.raises(AgreementError, match=r"disagree on schedule .*level 1.0 of \[1.0, 0.5\]"):
        measure_plainly(levels, num_stages=2)


def test_levels_of_other_stages_are_refused() -> None:
    batch = mlp_batch()

    def main(group: LocalGroup) -> None:
        penstock.measure_memory_levels(
            lambda level: make_stages(group, mlp(level), range(level)),
            [1, 2],
            4,
            mean_square,
            *batch.args,
            target=batch.target,
            repeats=1,
        )

    with pytest.raises(CostError, match="The costs of level 2 are for 2 stages, those of level 1"):
        local_ranks(1, main)
