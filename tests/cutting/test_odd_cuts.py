"""Models that do odd things about their cuts, and train as if they were whole all the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import penstock
from cut_nets import WIDTH, Net, Run, check, make_batch, randn
from cut_training import NUM_MICROBATCHES, ROWS
from penstock import SplitPoint, pipe_split
from staged_models import Batch


class Case(NamedTuple):
    run: Run
    num_stages: int
    modules: Callable[[], dict[str, nn.Module]]


CASES: dict[str, Case] = {}


def case(num_stages: int, **modules: Callable[[], nn.Module]) -> Callable[[Run], Run]:
    """Register a forward, and the modules that it needs beside the layers."""

    def register(run: Run) -> Run:
        def make() -> dict[str, nn.Module]:
            return {name: make_module() for name, make_module in modules.items()}

        CASES[run.__name__] = Case(run, num_stages, make)
        return run

    return register


@case(2)
def in_place_right_after_a_cut(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    h.relu_()
    return net.layers[1](h)


@case(3)
def in_place_after_each_of_two_cuts(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    side = net.layers[1](x)
    pipe_split()
    side.add_(1)
    h = torch.tanh(net.layers[2](h)) + side
    pipe_split()
    side.mul_(2)
    return net.layers[3](h) + side


@case(2)
def in_place_before_a_cut_on_what_crosses(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    view = h[:, :2]
    h.mul_(2)
    pipe_split()
    return net.layers[1](h) + view.sum(1, keepdim=True)


@case(3)
def write_through_a_view_made_after_the_cut(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    h[:, :2].mul_(3)
    side = net.layers[1](x)
    pipe_split()
    return net.layers[2](h) + side


@case(3)
def write_to_a_view_whose_base_stays(net: Net, x: Tensor) -> Tensor:
    view = net.layers[0](x)[:, :2]
    pipe_split()
    view.mul_(2)
    side = net.layers[1](x)
    pipe_split()
    return net.layers[2](torch.cat([view, view], 1)) + side


@case(3)
def a_tensor_and_its_views_cross(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    flat, column, turned = h.view(-1), h[:, :1], h.t()
    pipe_split()
    side = net.layers[1](h)
    pipe_split()
    return net.layers[2](h) * side + flat.view(h.shape) + column + turned.t()


@case(3)
def chunks_cross(net: Net, x: Tensor) -> Tensor:
    left, right = net.layers[0](x).chunk(2, 1)
    pipe_split()
    h = net.layers[1](torch.cat([right, left], 1))
    pipe_split()
    return net.layers[2](h) + torch.cat([left, left], 1)


@case(2)
def all_parts_of_a_split_cross(net: Net, x: Tensor) -> Tensor:
    parts = net.layers[0](x).split(1, 1)
    pipe_split()
    return net.layers[1](torch.cat(parts[::-1], 1))


@case(2)
def maximum_and_its_indices_cross(net: Net, x: Tensor) -> Tensor:
    values, indices = net.layers[0](x).max(1, keepdim=True)
    pipe_split()
    return net.layers[1](x).gather(1, indices) * values


@case(2)
def results_of_many_kinds(net: Net, x: Tensor) -> Any:
    h = net.layers[0](x)
    pipe_split()
    late = net.layers[1](h)
    return {"none": None, "late": late, "more": [3, h.argmax(1), (h, x)], "flag": h > 0}


@case(4)
def input_used_by_the_last_stage(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    h = net.layers[1](h)
    pipe_split()
    h = net.layers[2](h)
    pipe_split()
    return net.layers[3](h) + 2 * x


@case(4)
def stages_without_parameters(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    h = torch.tanh(h) * 2
    pipe_split()
    h = torch.sin(h)
    pipe_split()
    return net.layers[1](h)


@case(2)
def first_stage_without_parameters(net: Net, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    pipe_split()
    return net.layers[0](h)


@case(2)
def last_stage_without_parameters(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    return torch.tanh(h)


@case(3)
def constants_made_in_forward(net: Net, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    mask = torch.arange(WIDTH) > 1
    table = torch.zeros(x.shape[0], WIDTH, dtype=torch.float64)
    table[:, 1:] = 1
    h = net.layers[0](x) * scale * table
    pipe_split()
    h = torch.where(mask, net.layers[1](h), h) + table
    pipe_split()
    return net.layers[2](h).masked_fill(~mask, 0.5) * scale


@case(2)
def number_that_depends_on_the_shape(net: Net, x: Tensor) -> Tensor:
    h, count = net.layers[0](x), x.shape[0]
    pipe_split()
    return net.layers[1](h) / count


@case(2)
def no_gradients_on_both_sides(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    with torch.no_grad():
        early = net.layers[1](h).sigmoid()
    pipe_split()
    with torch.no_grad():
        late = net.layers[2](h).sigmoid()
    return net.layers[3](h) * early * late


@case(2)
def detached_value_crosses(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    fixed = h.detach()
    pipe_split()
    return net.layers[1](h) * fixed


@case(2)
def autocast_on_one_side(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = h + functional.linear(h.float(), net.layers[1].weight.float()).double()
    pipe_split()
    return net.layers[2](h)


@case(2)
def checkpoints_on_both_sides(net: Net, x: Tensor) -> Tensor:
    h = checkpoint(net.layers[0], x, use_reentrant=False)
    pipe_split()
    return checkpoint(lambda value: torch.tanh(net.layers[1](value)), h, use_reentrant=False)


@case(2)
def cut_in_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    def body(value: Tensor) -> Tensor:
        value = net.layers[1](value)
        pipe_split()
        return net.layers[2](value)

    return checkpoint(body, net.layers[0](x), use_reentrant=False)


@case(3, norm=lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
def parametrized_module_in_two_stages(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    h = torch.tanh(net.norm(h))
    pipe_split()
    return net.norm(h)


@case(2, norm=lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
def buffers_changed_without_gradients(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    return net.norm(h)


@case(2)
def attention_of_what_crosses(net: Net, x: Tensor) -> Tensor:
    query, key = net.layers[0](x)[:, :, None], net.layers[1](x)[:, :, None]
    pipe_split()
    value = net.layers[2](x)[:, :, None]
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return net.layers[3](mixed[..., 0])


@case(2)
def complex_numbers_in_between(net: Net, x: Tensor) -> Tensor:
    h = torch.fft.fft(net.layers[0](x), norm="ortho").real
    pipe_split()
    return net.layers[1](h)


@case(2)
def parameter_itself_crosses_nothing(net: Net, x: Tensor) -> Tensor:
    weight = net.layers[0].weight.t()
    h = x @ weight
    pipe_split()
    return h @ weight + net.layers[1](h)


@pytest.mark.filterwarnings("ignore:Net checkpoints activations")
@pytest.mark.parametrize("name", CASES)
def test_odd_cut_trains_as_whole(name: str) -> None:
    run, num_stages, modules = CASES[name]
    check(Net(run, **modules()), num_stages, [make_batch(), make_batch()])


def _two_layers(net: Net, x: Tensor) -> Tensor:
    h = torch.tanh(net.layers[0](x))
    pipe_split()
    return net.layers[1](h)


@pytest.mark.parametrize("index", [0, 1])
def test_frozen_stage_trains_as_whole(index: int) -> None:
    model = Net(_two_layers)
    model.layers[index].requires_grad_(False)
    check(model, 2, [make_batch(), make_batch()])


def test_model_that_is_not_training_trains_as_whole() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.drop(net.norm(net.layers[0](x)))
        pipe_split()
        return net.drop(net.layers[1](h))

    model = Net(run, norm=nn.BatchNorm1d(WIDTH), drop=nn.Dropout(0.5)).eval()
    check(model, 2, [make_batch(), make_batch()])


def test_arguments_of_all_kinds() -> None:
    def run(net: Net, pair: Any, *rest: Any, scale: float, **named: Any) -> Tensor:
        h = net.layers[0](pair[0]) + rest[0]
        pipe_split()
        return net.layers[1](h) * named["mask"] + pair[1]["key"][0] * scale + named["more"][1]

    def make() -> Batch:
        size = ROWS * NUM_MICROBATCHES
        tensors = [randn(size, WIDTH) for _ in range(5)]
        args = ((tensors[0], {"key": [tensors[1]]}), tensors[2])
        kwargs = {"scale": 0.5, "mask": tensors[3], "more": (None, tensors[4])}
        return Batch(args, kwargs, torch.zeros(size))

    check(Net(run), 2, [make(), make()])


def test_keyword_arguments_that_are_none() -> None:
    def run(net: Net, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        h = net.layers[0](x)
        pipe_split()
        return net.layers[1](h if mask is None else h * mask)

    batch = make_batch()._replace(kwargs={"mask": None})
    check(Net(run), 2, [batch, batch])


@pytest.mark.parametrize("side", SplitPoint)
def test_many_cuts_of_one_module_that_is_called_often(side: SplitPoint) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        for _ in range(3):
            h = torch.tanh(net.layers[1](h))
        return h

    check(Net(run), 4, [make_batch()], split_spec={"layers.1": side})


@pytest.mark.parametrize(
    "name", ["args", "kwargs", "input", "output", "torch", "1", "a b", "odd-name", "é"]
)
def test_module_with_an_odd_name(name: str) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return net._modules[name](torch.tanh(net.layers[0](x)))

    spec = {"layers.0": SplitPoint.END}
    check(Net(run, **{name: nn.Linear(WIDTH, WIDTH)}), 2, [make_batch()], split_spec=spec)


def test_dropout_follows_the_random_state_of_the_model() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.drop(net.layers[0](x))
        pipe_split()
        return functional.dropout(net.layers[1](h), 0.5, net.training)

    model = Net(run, drop=nn.Dropout(0.5))
    x = torch.randn(ROWS, WIDTH)
    pipe = penstock.cut(model, (x,))
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(expected, pipe(x))


def test_tensor_that_is_no_buffer_is_kept_but_not_saved() -> None:
    model = Net(_with_ramp)
    model.ramp = torch.arange(4.0, dtype=torch.float64)
    pipe = check(model, 2, [make_batch()])
    assert set(model.state_dict()) == {
        key for index in range(2) for key in pipe.get_stage_module(index).state_dict()
    }


def _with_ramp(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x) * net.ramp
    pipe_split()
    return net.layers[1](h) + net.ramp


def test_model_traced_without_gradients_trains_all_the_same() -> None:
    model = Net(_two_layers)
    with torch.no_grad():
        pipe = penstock.cut(model, (torch.ones(ROWS, WIDTH),))
    assert pipe(torch.ones(ROWS, WIDTH)).requires_grad
