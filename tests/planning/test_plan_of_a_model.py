"""Plans for models, from their shapes or from times, and what follows from them."""

import logging

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Placement

WIDTH = 16


class Net(nn.Module):
    """Embedding, blocks in a list, head; with a value that skips all of them."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x + first)


def sequential() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def test_costs_are_counted_for_each_size_of_a_microbatch() -> None:
    model, tokens = Net(), torch.zeros(8, 5, dtype=torch.long)
    plan = penstock.plan(
        model, 2, batch=(tokens,), microbatches=[2, 8], stages_per_rank=1, effort=0.02
    )
    for row in plan.rows:
        counted = penstock.count_layers(model, (tokens[: row.mb_size],))
        assert [cost.time for cost in counted] == list(row.partition.costs)
        total = sum(parameter.nbytes for parameter in model.parameters())
        assert 4 * total == sum(row.parameter_memory)
        assert sum(cost.activation_bytes for cost in counted) == sum(row.costs.after_forward)


@pytest.mark.parametrize("measure", [False, True])
def test_loss_counts_with_the_last_layer(measure: bool) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    model, tokens = Net(), torch.zeros(8, 5, dtype=torch.long)
    options = {"microbatches": 4, "stages_per_rank": 1, "effort": 0.02, "measure": measure}
    plain = penstock.plan(model, 2, batch=(tokens,), **options).best
    row = penstock.plan(model, 2, batch=(tokens,), loss_fn=loss_fn, target=tokens, **options).best
    log_probabilities = 2 * 5 * 10 * 4  # Of one microbatch.
    held = sum(row.costs.after_forward) - sum(plain.costs.after_forward)
    assert log_probabilities <= held <= log_probabilities + 8
    needed = row.parameter_memory[-1] - plain.parameter_memory[-1]
    if row.cut_points == plain.cut_points:
        assert 2 * log_probabilities <= needed <= 2 * log_probabilities + 8
    if not measure:
        assert row.partition.costs[:-1] == plain.partition.costs[:-1]
        assert row.partition.costs[-1] > plain.partition.costs[-1]


def test_model_on_the_meta_device_gets_the_same_plan() -> None:
    tokens = torch.zeros(8, 5, dtype=torch.long)
    options = {"memory": 30_000, "effort": 0.02, "keep": 3}
    real = penstock.plan(Net(), 2, batch=tokens, **options)
    with torch.device("meta"):
        meta = penstock.plan(Net(), 2, batch=(torch.empty_like(tokens),), **options)
    assert str(real) == str(meta)
    assert max(real.best.memory) <= 30_000


def test_speed_turns_operations_into_seconds() -> None:
    options = {"batch": torch.randn(4, WIDTH), "microbatches": 4, "stages_per_rank": 1}
    operations = penstock.plan(sequential(), 2, **options).best
    seconds = penstock.plan(sequential(), 2, **options, speed=1e6).best
    assert operations.time == pytest.approx(seconds.time * 1e6)


def test_keyword_arguments_are_cut_like_the_batch() -> None:
    class Scaled(Net):
        def forward(self, tokens: Tensor, *, scale: Tensor) -> Tensor:
            return super().forward(tokens) * scale

    kwargs = {"tokens": torch.zeros(4, 5, dtype=torch.long), "scale": torch.ones(4, 5, 1)}
    plan = penstock.plan(Scaled(), 2, batch=(), kwargs=kwargs, stages_per_rank=1)
    assert {2, 4} == {row.num_microbatches for row in plan.rows}


def test_layers_are_those_of_split() -> None:
    model, x = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": sequential()}), torch.randn(4, 16)
    options = {"microbatches": 4, "stages_per_rank": 1}
    row = penstock.plan(model, 2, batch=x, layers=["b", torch.tanh, "a"], **options).best
    pipe = penstock.cut_between_modules(model, row.cut_points, layers=["b", torch.tanh, "a"])
    assert 2 == pipe.num_stages


def test_measured_plan_is_in_seconds() -> None:
    model = sequential()
    before = [parameter.clone() for parameter in model.parameters()]
    plan = penstock.plan(
        model, 2, batch=torch.randn(4, WIDTH), measure=True, microbatches=[2], effort=0.02
    )
    assert 0 < plan.best.time < 10
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("placement", [Placement.linear(2), Placement.v(2)], ids=str)
def test_row_is_run_as_it_stands(placement: Placement) -> None:
    tokens, target = torch.randint(10, (8, 5)), torch.randint(10, (8, 5))
    model = Net()
    plan = penstock.plan(model, 2, batch=tokens, microbatches=4, keep=3, effort=0.02)
    [row] = [row for row in plan.rows if placement == row.placement]

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    loss_fn(model(tokens), target).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    pipe = penstock.cut(model, (tokens[: row.mb_size],), split_spec=row.split_spec)
    assert row.placement.num_stages == pipe.num_stages

    def run_rank(group: penstock.LocalGroup) -> dict[str, Tensor | None]:
        held = row.placement.stages_of(group.rank)
        stages = [pipe.build_stage(stage, "cpu", group) for stage in held]
        pipeline = penstock.Pipeline(stages, row.schedule, loss_fn=loss_fn)
        pipeline.step(tokens, target=target)
        named = (pair for stage in stages for pair in stage.submod.named_parameters())
        return {name: weight.grad for name, weight in named}

    first, second = penstock.local_ranks(2, run_rank)
    assert expected.keys() == first.keys() | second.keys()
    for name, grad in (first | second).items():
        # Gradients of microbatches are added up one after the other.
        torch.testing.assert_close(expected[name], grad)


def test_split_spec_cuts_where_the_partition_says() -> None:
    model, tokens = Net(), torch.zeros(4, 5, dtype=torch.long)
    row = penstock.plan(model, 2, batch=tokens, microbatches=2, stages_per_rank=2, effort=0.02).best
    pipe = penstock.cut(model, (tokens[:2],), split_spec=row.split_spec)
    names = [cost.name for cost in penstock.count_layers(model, (tokens[:2],))]
    for stage in range(pipe.num_stages):
        expected = {names[layer] for layer in row.partition.layers_of(stage)}
        held = dict(pipe.get_stage_module(stage).named_parameters())
        assert expected == {name.rpartition(".")[0] for name in held}


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    batch = torch.randn(4, WIDTH)
    penstock.plan(sequential(), 2, batch=batch, microbatches=4, effort=0.02)
    assert "planning: counting layers for 4 microbatches" in caplog.messages
    assert any(line.startswith("planning, 1 of ") for line in caplog.messages)
