"""Models cut between their modules, without tracing, train as the whole model does."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from cut_training import NUM_MICROBATCHES, ROWS, assert_trained_like, train_pipe
from penstock import Balanced, Pipe, Placement
from staged_models import Batch

WIDTH, VOCABULARY = 4, 7


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def make_batch(**kwargs: Tensor) -> Batch:
    size = ROWS * NUM_MICROBATCHES
    x, target = torch.randn(2, size, WIDTH, dtype=torch.float64)
    return Batch((x,), kwargs, target)


def check(
    model: nn.Module,
    pipe: Pipe,
    batches: list[Batch],
    loss_fn: Any = functional.mse_loss,
) -> None:
    """Raises unless a pipe of a model trains as the model itself did if it were not cut."""
    whole = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    for name in ("1F1B", "ZB-V"):
        stages_per_rank = penstock.schedules.get(name).stages_per_rank
        if pipe.num_stages % stages_per_rank:
            continue
        for index in range(pipe.num_stages):
            module = pipe.get_stage_module(index)
            module.load_state_dict({key: start[key] for key in module.state_dict()})
            module.zero_grad()
        num_ranks = pipe.num_stages // stages_per_rank
        ranks = penstock.local_ranks(num_ranks, train_pipe, pipe, name, batches, loss_fn)
        assert_trained_like(copy.deepcopy(whole), batches, loss_fn, ranks)


def names_of(pipe: Pipe) -> list[list[str]]:
    return [list(pipe.get_stage_module(i).state_dict()) for i in range(pipe.num_stages)]


def nested() -> nn.Sequential:
    inner = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.Tanh()))
    return nn.Sequential(linear(), inner, nn.Dropout(0.0), linear()).double()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_nested_sequential_trains_as_whole(num_stages: int) -> None:
    model = nested()
    check(model, penstock.cut_between_modules(model, num_stages), [make_batch(), make_batch()])


def test_sequential_is_cut_at_names_inside_it() -> None:
    model = nested()
    pipe = penstock.cut_between_modules(model, ["1.2", "3"])
    assert [
        ["0.weight", "0.bias", "1.0.weight", "1.0.bias"],
        ["1.2.0.weight", "1.2.0.bias"],
        ["3.weight", "3.bias"],
    ] == names_of(pipe)
    assert model.get_parameter("1.2.0.weight") is pipe.get_stage_module(1).get_parameter(
        "1.2.0.weight"
    )
    check(model, pipe, [make_batch()])


def test_chain_gives_what_the_model_gives_to_the_last_bit() -> None:
    model = nested()
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    for num_stages in (2, 5):
        assert torch.equal(model(x), penstock.cut_between_modules(model, num_stages)(x))


class Shifted(nn.Module):
    """A layer with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, side: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) * mask, side + x


class WithLayers(nn.Module):
    """Has a forward of its own: pairs go through its layers, and functions stand in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))
        self.last = linear()

    def forward(self, x: Tensor, *, mask: Tensor, scale: Tensor) -> Tensor:
        pair = double(self.first(x))
        for block in self.blocks:
            pair = block(*pair, mask=mask)
        return self.last(join(*pair, scale=scale))


def double(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, 2 * x


def join(x: Tensor, side: Tensor, scale: Tensor) -> Tensor:
    return x * scale + side


@pytest.mark.parametrize("cuts", [["blocks"], ["blocks.1"], ["join"], ["double", "blocks.2"], 4])
def test_layers_functions_and_keywords_train_as_whole(cuts: Any) -> None:
    model = WithLayers().double()
    pipe = penstock.cut_between_modules(
        model, cuts, layers=["first", double, "blocks", join, "last"]
    )
    size = ROWS * NUM_MICROBATCHES
    batches = [
        make_batch(mask=torch.rand(size, WIDTH).double(), scale=torch.rand(size, 1).double())
        for _ in range(2)
    ]
    check(model, pipe, batches)


class TiedChain(nn.Module):
    """A tied head, a module that is called in two stages, and one that is called twice in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.blocks.append(self.blocks[1])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@pytest.mark.parametrize("cuts", [["blocks.1"], ["blocks.2"], ["blocks.1", "blocks.2", "head"]])
def test_tied_parameters_and_modules_train_as_whole(cuts: list[str]) -> None:
    model = TiedChain().double()
    pipe = penstock.cut_between_modules(model, cuts, layers=["embed", "blocks", "head"])
    size = ROWS * NUM_MICROBATCHES
    batch = Batch((torch.randint(VOCABULARY, (size, 2)),), {}, torch.randint(VOCABULARY, (size, 2)))

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), target.flatten())

    check(model, pipe, [batch, batch], loss_fn)


def test_parameter_tied_within_one_stage_trains_as_whole() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), linear(), linear()).double()
    model[2].weight = model[0].weight
    model[4].bias = model[3].bias
    check(model, penstock.cut_between_modules(model, ["3"]), [make_batch(), make_batch()])


def test_module_called_in_two_stages_by_one_name_trains_as_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = linear(), linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            h = self.shared(torch.tanh(self.first(x)))
            return self.shared(torch.tanh(self.last(h)))

    model = Twice().double()
    layers = ["first", torch.tanh, "shared", "last", torch.tanh, "shared"]
    pipe = penstock.cut_between_modules(model, ["last"], layers=layers)
    assert [("shared.weight", "shared.bias")] * 2 == [s.tied for s in pipe.info().stages]
    check(model, pipe, [make_batch(), make_batch()])


def test_cutting_leaves_the_model_as_it_was() -> None:
    model = TiedChain().double().eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    pipe = penstock.cut_between_modules(model, 3, layers=["embed", "blocks", "head"])
    assert modules == dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert tensors[name] is parameter
        assert torch.equal(state[name], parameter)
    layers = [m for i in range(3) for m in pipe.get_stage_module(i).modules() if m.state_dict()]
    assert not any(layer.training for layer in layers if not list(layer.children()))


def test_stage_switches_its_layers_between_training_and_not() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), linear())
    pipe = penstock.cut_between_modules(model, 2)
    x = torch.randn(3, WIDTH)
    for index in range(2):
        pipe.get_stage_module(index).eval()
    assert not model[1].training
    assert torch.equal(model.eval()(x), pipe(x))


def uneven() -> nn.Sequential:
    sizes = [(WIDTH, 64), (64, 64), (64, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)]
    return nn.Sequential(*(nn.Linear(*size) for size in sizes)).double()


def test_example_balances_stages_by_cost() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    assert [["0", "1", "2"], ["3", "4"]] == _layers(penstock.cut_between_modules(uneven(), 2))
    assert [["0", "1"], ["2", "3", "4"]] == _layers(
        penstock.cut_between_modules(uneven(), 2, mb_args=(x,))
    )


def test_policy_with_costs_needs_no_example() -> None:
    policy = Balanced(2, costs=[1.0, 1.0, 1.0, 1.0, 4.0])
    assert [["0", "1", "2", "3"], ["4"]] == _layers(penstock.cut_between_modules(uneven(), policy))


def test_placement_in_a_v_gives_each_rank_its_share() -> None:
    model = nn.Sequential(*(linear() for _ in range(8)))
    costs = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0]
    pipe = penstock.cut_between_modules(
        model, Balanced(4, costs=costs, placement=Placement.v(num_ranks=2))
    )
    counts = [len(names) for names in _layers(pipe)]
    starts = [sum(counts[:stage]) for stage in range(5)]
    times = [sum(costs[a:b]) for a, b in pairwise(starts)]
    assert 8.0 == max(times[0] + times[3], times[1] + times[2])


def _layers(pipe: Pipe) -> list[list[str]]:
    return [list(dict(pipe.get_stage_module(i).named_children())) for i in range(pipe.num_stages)]
