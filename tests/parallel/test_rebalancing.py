"""Layers that move between ranks: training goes on as if they had always been there."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Auto, Balanced, LocalGroup, local_ranks
from penstock.errors import PartitionError
from penstock.parallel.mesh_dims import MeshDims
from penstock.parallel.moved_tensors import HeldTensors, Moving
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.rebalancing import empty_copy

NUM_RANKS, NUM_LAYERS, WIDTH = 3, 6, 8
SLOW_RANK = 1
MakeOptimizer = Callable[[ParallelModel], torch.optim.Optimizer]


class Block(nn.Module):
    """A layer with running statistics, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.rand(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x))) * self.scale  # type: ignore[operator]


class Untraceable(nn.Module):
    """A model that is cut between its layers, as its forward asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x + 1
        for block in self.blocks:
            x = block(x)
        return x


def sequential() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))


def adam(pipe: ParallelModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.named_parameters(), lr=1e-2)


def momentum(pipe: ParallelModel) -> torch.optim.Optimizer:
    named = list(pipe.named_parameters())
    weights = [parameter for name, parameter in named if name.endswith("linear.weight")]
    others = [parameter for name, parameter in named if not name.endswith("linear.weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


@contextmanager
def slow_rank(*, recovers: bool = False) -> Iterator[None]:
    """Let a rank be measured twice as slow, as long as its first pipeline runs if it recovers."""
    pipelines: dict[int, list[Any]] = defaultdict(list)

    def times(pipeline: Any) -> dict[int, float]:
        rank = next(iter(pipeline.stages.values())).group_rank
        if pipeline not in pipelines[rank]:
            pipelines[rank].append(pipeline)
        is_slow = rank == SLOW_RANK and not (recovers and len(pipelines[rank]) > 1)
        return {
            index: (2.0 if is_slow else 1.0)
            * num_layers(n for n, _ in stage.submod.named_parameters(remove_duplicate=False))
            for index, stage in pipeline.stages.items()
        }

    with mock.patch("penstock.parallel.rebalancing.stage_times", times):
        yield


def num_layers(names: Iterable[str]) -> int:
    return sum(name.endswith("linear.weight") for name in names)


def make_pipe(group: LocalGroup, make: Callable[[], nn.Module], **options: Any) -> ParallelModel:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(16, WIDTH, dtype=torch.float64)
    given = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 4, "schedule": "ZB-H1"}
    given["cut"] = Balanced(
        options.pop("num_stages", NUM_RANKS),
        placement=options.pop("placement", None),
        costs=options.pop("costs", None),
    )
    return penstock.parallelize(model, x, group=group, **{**given, **options})


def train(
    group: LocalGroup,
    make: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    moves: dict[int, bool],
    options: dict[str, Any],
) -> tuple[list[float], list[str]]:
    """Return the losses, and the names of this rank's parameters at the end."""
    pipe = make_pipe(group, make, **options)
    optimizer = make_optimizer(pipe)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(5):
        x, target = torch.randn(
            2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=target).item())
        if step in moves:  # Before the optimizer's step: gradients move too.
            assert moves[step] is pipe.rebalance(optimizer)
        optimizer.step()
        rates.step()
    losses.append(pipe.evaluate(x, target=target).item())
    return losses, [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize(
    ("make", "make_optimizer", "options"),
    [
        (sequential, adam, {}),
        (lambda: chain(), momentum, {"costs": [1.0] * NUM_LAYERS}),
    ],
    ids=["traced", "between modules"],
)
def test_losses_are_those_of_a_training_in_which_nothing_moved(
    make: Callable[[], nn.Module], make_optimizer: MakeOptimizer, options: dict[str, Any]
) -> None:
    """Microbatches, layers and sums are the same wherever a layer is, so each bit is."""
    expected = local_ranks(NUM_RANKS, train, make, make_optimizer, {}, options)
    with slow_rank():
        found = local_ranks(NUM_RANKS, train, make, make_optimizer, {2: True}, options)
    assert expected[0][0] == found[0][0]
    assert [2, 2, 2] == [num_layers(names) for _, names in expected]
    assert 1 == num_layers(found[SLOW_RANK][1])
    # All together have each parameter once.
    assert sorted(n for _, names in expected for n in names) == sorted(
        n for _, names in found for n in names
    )


def test_two_stages_per_rank_move_too() -> None:
    options = {
        "num_stages": 6,
        "placement": penstock.Placement.v(3),
        "schedule": "ZB-V",
        "costs": [1.0] * 12,
    }

    def make() -> nn.Module:
        return chain(12)

    expected = local_ranks(NUM_RANKS, train, make, adam, {}, options)
    with slow_rank():
        found = local_ranks(NUM_RANKS, train, make, adam, {2: True}, options)
    assert expected[0][0] == found[0][0]
    assert num_layers(found[1][1]) < num_layers(found[0][1])


def chain(length: int = NUM_LAYERS) -> nn.Module:
    return nn.Sequential(*(Whole() for _ in range(length)))


class Whole(Block):
    """A block that cannot be traced, so that the model has one layer for each."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x + 1
        return super().forward(x)


def test_layers_move_back_when_a_rank_has_recovered() -> None:
    def main(group: LocalGroup) -> list[list[str]]:
        pipe = make_pipe(group, chain, costs=[1.0] * NUM_LAYERS)
        found = [[name for name, _ in pipe.named_parameters()]]
        for _ in range(2):
            assert pipe.rebalance(None)
            found.append([name for name, _ in pipe.named_parameters()])
        return found

    with slow_rank(recovers=True):
        ranks = local_ranks(NUM_RANKS, main)
    for names in ranks:
        assert names[0] == names[2]
    assert [3, 1, 2] == [num_layers(names[1]) for names in ranks]


def test_parameter_that_stays_is_the_same_object_and_others_are_freed() -> None:
    def main(group: LocalGroup) -> tuple[int, int]:
        pipe = make_pipe(group, chain, costs=[1.0] * NUM_LAYERS)
        before = dict(pipe.named_parameters())
        frozen = next(iter(before.values())).requires_grad_(False)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        assert pipe.rebalance(optimizer)
        after = dict(pipe.named_parameters())
        assert list(after.values()) == optimizer.param_groups[0]["params"]
        assert all(parameter is before[name] for name, parameter in after.items() if name in before)
        assert not frozen.requires_grad
        return len(before), len(after.keys() & before.keys())

    with slow_rank():
        found = local_ranks(NUM_RANKS, main)
    assert found[SLOW_RANK][1] < found[SLOW_RANK][0]


def test_modes_and_frozen_parameters_move() -> None:
    def main(group: LocalGroup) -> None:
        pipe = make_pipe(group, chain, costs=[1.0] * NUM_LAYERS).eval()
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(name.startswith(("2.", "3.")))
        assert pipe.rebalance(None)
        for name, parameter in pipe.named_parameters():
            assert parameter.requires_grad is name.startswith(("2.", "3."))
        assert not any(m.training for s in pipe.stages.values() for m in s.submod.modules())

    with slow_rank():
        local_ranks(NUM_RANKS, main)


def test_move_is_logged_with_the_speeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")

    def main(group: LocalGroup) -> None:
        pipe = make_pipe(group, chain, costs=[1.0] * NUM_LAYERS)
        assert pipe.rebalance(None)
        assert not pipe.rebalance(None)

    with slow_rank():
        local_ranks(NUM_RANKS, main)
    moved, kept = [r.getMessage() for r in caplog.records if "speeds" in r.getMessage()]
    speeds = "(speeds of the ranks: 1.00, 0.50, 1.00)"
    assert f"moved layers between ranks: 3 stages, from 3, 4 {speeds}" == moved
    assert f"kept the cut: layers are where they take least {speeds}" == kept


@pytest.mark.parametrize("schedule", ["1F1B", Auto(seconds=0.5)])
def test_times_come_from_the_steps_that_were_watched(schedule: Any) -> None:
    def main(group: LocalGroup) -> bool:
        slow_when = 50.0 if isinstance(schedule, str) else None
        options = {"schedule": schedule, "slow_when": slow_when}
        if slow_when is None:
            options["stages_per_rank"] = 1
        pipe = make_pipe(group, chain, costs=[1.0] * NUM_LAYERS, **options)
        x = torch.randn(16, WIDTH, dtype=torch.float64)
        for _ in range(8):
            pipe.step(x, target=x)
        times = pipe.pipeline._runner.stage_times
        assert [group.rank] == list(times)
        assert all(time_s > 0 for time_s in times.values())
        moved = pipe.rebalance(None)
        pipe.step(x, target=x)
        return moved

    found = local_ranks(NUM_RANKS, main)
    assert [found[0]] * NUM_RANKS == found


def refuse(text: str, pipe_options: dict[str, Any], prepare: Any = None, made: Any = None) -> None:
    """Raise unless moving is refused with a text, and a step is possible afterwards."""

    def main(group: LocalGroup) -> None:
        options = {"costs": [1.0] * NUM_LAYERS, **pipe_options}
        pipe = make_pipe(group, made or chain, **options)
        optimizer = prepare(pipe) if prepare is not None else None
        before = dict(pipe.named_parameters())
        with pytest.raises(PartitionError, match=text):
            pipe.rebalance(optimizer)
        assert before == dict(pipe.named_parameters())
        x = torch.randn(16, WIDTH, dtype=torch.float64)
        pipe.step(x, target=x)

    local_ranks(NUM_RANKS, main)


def test_unknown_times_are_refused() -> None:
    refuse(r"rank 0: the times of the stages are not known yet\. Expected some steps", {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cut": ["2", "4"]}, "it was cut where the caller said. Save a checkpoint"),
        (
            {"optimizer_in_backward": lambda named: torch.optim.SGD(named, lr=0.1)},
            "cannot be moved: its optimizers step in the backward",
        ),
    ],
)
def test_model_that_cannot_be_cut_again_is_refused(options: dict[str, Any], text: str) -> None:
    with slow_rank():
        refuse(text, options, made=sequential if "cut" in options else None)


def test_model_that_cannot_be_copied_is_refused() -> None:
    class Uncopied(nn.Sequential):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("I am one of a kind")

    with slow_rank():
        refuse(
            r"no empty copy of it could be made \(RuntimeError: I am one of a kind\)",
            {},
            made=lambda: Uncopied(*(Block() for _ in range(NUM_LAYERS))),
        )


def test_model_that_reads_values_is_refused() -> None:
    with slow_rank():
        refuse("an empty copy of the model cannot be cut .RuntimeError", {}, made=Untraceable)


def test_tied_parameters_are_refused() -> None:
    def tied() -> nn.Module:
        model = chain()
        model[5].linear.weight = model[0].linear.weight  # type: ignore[index]
        return model

    with slow_rank():
        refuse("rank 0: stage 0 has parameters that are tied", {}, made=tied)


def test_parameters_that_a_new_cut_ties_are_refused() -> None:
    def tied() -> nn.Module:
        model = chain()
        model[2].linear.weight = model[3].linear.weight  # type: ignore[index]
        return model

    with slow_rank():
        refuse(
            "in the new cut, stage 0 has parameters that are tied",
            {},
            made=tied,
        )


def test_optimizers_that_differ_are_refused() -> None:
    def prepare(pipe: ParallelModel) -> torch.optim.Optimizer:
        return torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + pipe.rank))

    with slow_rank():
        refuse("the optimizers of rank 0 and rank 1 differ in their kinds", {}, prepare)


def test_optimizer_of_another_model_is_refused() -> None:
    def prepare(pipe: ParallelModel) -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.ones(1)), *pipe.parameters()], lr=0.1)

    with slow_rank():
        refuse("rank 0: the optimizer has 1 parameters that are not of this rank's", {}, prepare)


def test_hooks_are_refused() -> None:
    def prepare(pipe: ParallelModel) -> None:
        for stage in pipe.stages.values():
            stage.submod.register_forward_hook(lambda *_: None)

    with slow_rank():
        refuse("rank 0: the module '' of stage 0 has hooks that the model did not", {}, prepare)

    def mask(pipe: ParallelModel) -> None:
        for parameter in pipe.parameters():
            parameter.register_hook(lambda grad: grad)

    with slow_rank():
        refuse("has hooks, which cannot be moved. Remove them before, and add them", {}, mask)


def test_gradients_that_are_not_complete_are_refused() -> None:
    def prepare(pipe: ParallelModel) -> None:
        x = torch.randn(16, WIDTH, dtype=torch.float64)
        pipe.step(x, target=x, finalize=False)

    with slow_rank():
        refuse("the last step was run with finalize=False", {}, prepare)


def test_stages_that_are_spread_are_refused() -> None:
    dims: Any = SimpleNamespace(replicas=None, shards="a mesh", tensor=None)
    for options, expected in (
        ({"dims": dims, "is_compiled": False}, "its stages are replicated, sharded or tensor"),
        ({"dims": MeshDims(None), "is_compiled": True}, "its stages are compiled"),
    ):
        found = empty_copy(chain(), None, cut=None, steps_in_backward=False, **options)  # type: ignore[arg-type]
        assert isinstance(found, str)
        assert found.startswith(expected)


def test_copy_that_is_cut_elsewhere_is_refused() -> None:
    def prepare(pipe: ParallelModel) -> None:
        recutting: Any = pipe._recutting
        recutting.policy = replace(recutting.policy, costs=[9.0, 1, 1, 1, 1, 1])

    with slow_rank():
        refuse("an empty copy of the model was cut into 3 stages, from 1", {}, prepare)


def test_tensor_that_no_rank_holds_is_refused() -> None:
    held = HeldTensors([chain(1)], None, torch.device("cpu"))
    moving = Moving(0, torch.device("cpu"), held, [held.describe()], [["0.linear.weight", "x"]])
    with pytest.raises(PartitionError, match="no rank holds 'x', which a stage of the new cut"):
        moving.check()
