"""What went wrong with cut models once: silently other results, or errors without a remedy."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from cut_nets import WIDTH, Net, check, make_batch
from limits import HANG_S
from penstock import Balanced, SplitPoint, pipe_split
from penstock.errors import PartitionError, StageError, TraceError
from staged_models import Batch


def batches() -> list[Batch]:
    return [make_batch(), make_batch()]


def two_layers(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    pipe_split()
    return net.layers[1](h)


def step(pipe: penstock.CutModel, x: Tensor) -> Any:
    """One step of 1F1B; what its last rank gives."""

    def main(group: penstock.LocalGroup) -> Any:
        stage = pipe.build_stage(group.rank, "cpu", group)
        pipeline = penstock.Pipeline(
            [stage], "1F1B", num_microbatches=2, loss_fn=lambda y, _: y.mean(), timeout=HANG_S
        )
        return pipeline.step(x, target=x)

    return penstock.local_ranks(pipe.num_stages, main)[-1]


class TripleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def refused(*, because: str) -> Any:
    return pytest.raises(
        TraceError, match=f"Net cannot be traced: {because}.*penstock.cut_between_modules"
    )


def test_autograd_function_is_refused() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = TripleGrad.apply(net.layers[0](x))
        pipe_split()
        return net.layers[1](h)

    with refused(because="it calls the autograd Function TripleGrad"):
        penstock.cut(Net(run), (torch.ones(2, WIDTH),))
    x = torch.ones(1, requires_grad=True)
    TripleGrad.apply(x).backward()
    assert 3 == x.grad


def test_tensor_hook_is_refused() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        h.register_hook(lambda grad: 2 * grad)
        pipe_split()
        return net.layers[1](h)

    with refused(because="its forward registers a hook on a tensor"):
        penstock.cut(Net(run), (torch.ones(2, WIDTH),))


def test_module_backward_hook_is_refused() -> None:
    model = Net(two_layers)
    model.layers[1].register_full_backward_hook(lambda module, given, taken: (2 * given[0],))
    with refused(because="its module 'layers.1' has a backward hook"):
        penstock.cut(model, (torch.ones(2, WIDTH),))


class WithBuffer(Net):
    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.register_buffer("mean", torch.zeros(WIDTH))


def test_buffer_changed_without_gradients_in_two_stages_is_refused() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        with torch.no_grad():
            net.mean.add_(h.mean(0))
        pipe_split()
        return net.layers[1](h) + net.mean

    with pytest.raises(PartitionError, match="is changed in the forward and used in stages"):
        penstock.cut(WithBuffer(run), (torch.ones(2, WIDTH),))


def test_norm_in_autocast_in_two_stages_is_refused() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        for number in (0, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                x = net.norm(net.layers[number](x))
            if number == 0:
                pipe_split()
        return net.layers[2](x)

    with pytest.raises(PartitionError, match="is changed in the forward and used in stages"):
        penstock.cut(Net(run, norm=nn.BatchNorm1d(WIDTH)), (torch.ones(2, WIDTH),))


def test_change_of_what_idle_dropout_returned_is_the_models_or_refused() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        same = functional.dropout(h, 0.5, False)
        pipe_split()
        h.mul_(2)
        return net.layers[1](h) + same

    try:
        check(Net(run), 2, batches())
    except PartitionError:
        return


def test_change_in_place_in_autocast_right_after_a_cut() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        pipe_split()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            h = functional.relu(h, inplace=True)
        return net.layers[1](h)

    check(Net(run), 2, batches())


def test_cast_in_a_stage_that_runs_in_autocast() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x).to(torch.float32)
        pipe_split()
        return net.layers[1](h)

    model, x = Net(run), torch.ones(2, WIDTH)
    pipe = penstock.cut(model, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), pipe(x))


class MakesConstant(nn.Module):
    def __init__(self, is_used_twice: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_used_twice = is_used_twice

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        h = self.first(x) * scale
        pipe_split()
        return self.last(h) * scale if self.is_used_twice else self.last(h)


@pytest.mark.parametrize("is_used_twice", [False, True])
def test_constant_of_a_model_on_the_meta_device_is_refused(is_used_twice: bool) -> None:
    with torch.device("meta"):
        model = MakesConstant(is_used_twice)
    pipe = penstock.cut(model, (torch.ones(2, WIDTH, device="meta"),))
    for index in range(2):
        module = pipe.get_stage_module(index).to_empty(device="cpu")
        state = MakesConstant(is_used_twice).state_dict()
        module.load_state_dict({key: state[key] for key in module.state_dict()})
    with pytest.raises(StageError, match=r"made on the meta device.*values are lost"):
        step(pipe, torch.ones(4, WIDTH))


def test_first_stage_changes_its_input_in_place() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        x.mul_(2)
        h = net.layers[0](x)
        pipe_split()
        return net.layers[1](h)

    step(penstock.cut(Net(run), (torch.ones(2, WIDTH),)), torch.ones(4, WIDTH))


def test_names_of_one_parameter_stay_one_after_to_empty() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        model[2].weight = model[0].weight
        return model

    with torch.device("meta"):
        empty = make()
    spec = {"1": SplitPoint.BEGINNING}
    pipe = penstock.cut(empty, (torch.ones(2, WIDTH, device="meta"),), split_spec=spec)
    state = make().state_dict()
    for index in range(2):
        module = pipe.get_stage_module(index).to_empty(device="cpu")
        module.load_state_dict({key: state[key] for key in module.state_dict()})
    step(pipe, torch.ones(4, WIDTH))
    for index in range(2):
        module = pipe.get_stage_module(index)
        assert module.get_parameter("0.weight") is module.get_parameter("2.weight")
        assert torch.equal(state["0.weight"], module.get_parameter("0.weight"))


@pytest.mark.parametrize("kind", ["assigned", "added to"])
def test_buffer_that_is_assigned_in_the_first_stage(kind: str) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        if kind == "assigned":
            net.mean = 0.9 * net.mean + h.detach().mean(0)
        else:
            net.mean += h.detach().mean(0)
        h = h - net.mean
        pipe_split()
        return net.layers[1](h)

    check(WithBuffer(run), 2, batches())


def test_number_that_depends_on_values_crosses() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h, count = net.layers[0](x), (x > 0).sum().item()
        pipe_split()
        return net.layers[1](h) * (count + 1)

    check(Net(run), 2, batches(), dynamic_shapes=True)


def test_split_before_a_module_that_works_in_place() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    step(penstock.cut_between_modules(model, ["1"]), torch.ones(4, WIDTH))


def test_measuring_modules_that_work_in_place() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    penstock.measure_layers(model, (torch.ones(2, WIDTH),), layers=["0", "1"], repeats=1)


@pytest.mark.parametrize("layers", [None, ["0", "1"]])
def test_measuring_leaves_the_example_as_it_was(layers: list[str] | None) -> None:
    x = -torch.ones(2, WIDTH)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    penstock.measure_layers(model, (x,), layers=layers, repeats=1)
    assert torch.equal(-torch.ones(2, WIDTH), x)


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.norm(self.layers[0](x)))
        return self.layers[2](self.norm(x))


def test_measuring_a_norm_that_is_called_twice() -> None:
    assert 3 == len(penstock.measure_layers(SharedNorm(), (torch.ones(2, WIDTH),), repeats=1))


def test_policy_cuts_where_it_can() -> None:
    # Only before the first norm or after the second.
    pipe = penstock.cut(SharedNorm(), (torch.ones(2, WIDTH),), split_policy=Balanced(2))
    assert 2 == pipe.num_stages


def test_split_refuses_parameters_that_no_layer_holds() -> None:
    model = nn.Module()
    model.first, model.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.shift = nn.Parameter(torch.zeros(WIDTH))
    layers = ["first", lambda h: h + model.shift, "last"]
    with pytest.raises(PartitionError, match="'shift' of Module is not in any of its"):
        penstock.cut_between_modules(model, 2, layers=layers)


def test_split_refuses_a_norm_in_two_stages() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    with pytest.raises(
        PartitionError, match="stages 0 and 1 both call a BatchNorm1d with the buffers"
    ):
        penstock.cut_between_modules(model, ["2"])


def test_split_at_one_name() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    assert 2 == penstock.cut_between_modules(model, "10").num_stages


def test_dict_with_its_keys_in_another_order() -> None:
    def run(net: Net, x: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        h = net.layers[0](x) + extra["a"]
        pipe_split()
        return net.layers[1](h) * extra["b"]

    x = torch.ones(2, WIDTH)
    pipe = penstock.cut(Net(run), (x,), {"extra": {"a": x, "b": 2 * x}})
    assert torch.equal(pipe(x, extra={"a": x, "b": 2 * x}), pipe(x, extra={"b": 2 * x, "a": x}))


@pytest.mark.parametrize("name", ["meta", "graph", "lambda"])
def test_name_that_a_graph_module_cannot_have_is_refused(name: str) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.layers[0](x)
        pipe_split()
        return net._modules[name](h)

    model = Net(run, **{name: nn.Linear(WIDTH, WIDTH)})
    try:
        penstock.cut(model, (torch.ones(2, WIDTH),))
    except TraceError:
        return
    except RuntimeError as error:
        raise RuntimeError("not ours") from error


def test_pipe_can_be_copied() -> None:
    copy.deepcopy(penstock.cut(Net(two_layers), (torch.ones(2, WIDTH),)))
