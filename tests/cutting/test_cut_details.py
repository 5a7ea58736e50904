"""Smaller things that a cut has to get right, each of which it once did not."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import penstock
from limits import HANG_S
from penstock import SplitPoint
from penstock.errors import CostError, PartitionError, StageError

WIDTH = 4


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


X = torch.ones(2, WIDTH)


def test_part_that_is_in_training_in_a_model_that_is_not_stays_so() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, WIDTH)).eval()
    model[1].train()
    pipe = penstock.cut(model, (X,), split_spec={"2": SplitPoint.BEGINNING})
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    assert torch.equal(expected, pipe(X))
    assert not torch.equal(pipe(X), pipe(X))


def test_dropout_that_is_always_on_stays_so_in_a_model_in_eval() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5)

    pipe = penstock.cut(Net().eval(), (torch.ones(100),))
    assert not torch.equal(pipe(torch.ones(100)), pipe(torch.ones(100)))


def test_sequential_with_a_hook_is_one_layer() -> None:
    inner = layers(2)
    inner.register_forward_hook(lambda module, args, output: 2 * output)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    pipe = penstock.cut_between_modules(model, 2)
    assert torch.equal(model(X), pipe(X))
    with pytest.raises(PartitionError, match=r"2 layers cannot be cut into 3 stages"):
        penstock.cut_between_modules(model, 3)


def test_sequential_with_a_forward_of_its_instance_is_one_layer() -> None:
    inner = layers(2)
    inner.forward = lambda x: inner[1](inner[0](x)) + 1
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    assert torch.equal(model(X), penstock.cut_between_modules(model, 2)(X))


def test_hook_of_the_model_itself_is_rejected() -> None:
    model = layers()
    model.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(PartitionError, match="Sequential has its own forward or hooks"):
        penstock.cut_between_modules(model, 2)


def test_buffer_of_the_model_itself_is_rejected() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(layers())
    model.register_buffer("mean", torch.zeros(1))
    with pytest.raises(PartitionError, match="'mean' of Module is not in any of its layers"):
        penstock.cut_between_modules(model, 2, layers=["layers"])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_module_with_state_in_two_stages_is_rejected() -> None:
    shared = Counting()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared)
    message = r"stages 0 and 1 both call a Counting with the buffers calls"
    with pytest.raises(PartitionError, match=message):
        penstock.cut_between_modules(model, ["2"])


class MakesPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(WIDTH, device=x.device) * x.detach().mean()
        return self.layer(x * self.scale) + positions


def build(pipe: penstock.CutModel, **options: Any) -> penstock.PipelineStage:
    return penstock.local_ranks(1, lambda group: pipe.build_stage(0, "cpu", group, **options))[0]


def test_model_cut_on_the_meta_device_runs_on_another() -> None:
    model = MakesPositions()
    with torch.device("meta"):
        empty = MakesPositions()
    pipe = penstock.cut(empty, (X.to("meta"),))
    pipe.get_stage_module(0).to_empty(device="cpu").load_state_dict(model.state_dict())
    with pytest.raises(StageError, match=r"stage 0 has the buffer 'scale', which was on the meta"):
        build(pipe)
    stage = build(pipe, buffers={"scale": model.scale})
    assert torch.equal(model(X), stage.submod(X))
    assert "scale" not in stage.submod.state_dict()


def put_mark(graph_module: fx.GraphModule, target: Any) -> fx.GraphModule:
    [*_, last] = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    with graph_module.graph.inserting_before(last):
        graph_module.graph.call_function(target)
    return graph_module


@pytest.mark.parametrize(
    "target",
    [penstock.pipe_split, torch.ops.penstock.pipe_split, torch.ops.penstock.pipe_split.default],
    ids=["function", "operator", "overload"],
)
def test_policy_may_put_any_form_of_pipe_split_into_the_graph(target: Any) -> None:
    pipe = penstock.cut(layers(), (X,), split_policy=lambda graph: put_mark(graph, target))
    assert 2 == pipe.num_stages


def test_policy_that_returns_nothing_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"split_policy returned a NoneType. Expected the"):
        penstock.cut(layers(), (X,), split_policy=lambda graph: None)


def test_models_can_be_traced_in_several_threads() -> None:
    apply, register_hook = vars(torch.autograd.Function)["apply"], Tensor.register_hook
    pipes: list[penstock.CutModel] = []

    def work() -> None:
        for _ in range(3):
            pipes.append(penstock.cut(layers(), (X,), split_policy=penstock.Balanced(2)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert 9 == len(pipes)
    assert apply is vars(torch.autograd.Function)["apply"]
    assert register_hook is Tensor.register_hook


def test_measuring_no_time_is_rejected() -> None:
    with pytest.raises(CostError, match=r"repeats is 0. Expected a whole number, at least 1"):
        penstock.measure_layers(layers(), (X,), repeats=0)


def test_measuring_that_fails_leaves_buffers_as_they_were() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            raise ValueError("as it was told")

    model = nn.Sequential(Fails())
    with pytest.raises(ValueError, match="as it was told"):
        penstock.measure_layers(model, (X,), layers=["0"])
    assert 0 == model[0].calls.item()


def test_layers_may_be_the_modules_themselves() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(layers(4))
    pipe = penstock.cut_between_modules(model, 2, layers=list(model.layers))
    assert [40, 40] == [stage.num_parameters for stage in pipe.info().stages]
    assert torch.equal(nn.Sequential(*model.layers)(X), pipe(X))
    assert set(model.state_dict()) == {
        name for stage in (0, 1) for name in pipe.get_stage_module(stage).state_dict()
    }


def test_layer_that_is_no_module_of_the_model_is_rejected() -> None:
    with pytest.raises(PartitionError, match="layers holds a Linear that is not a module of Sequ"):
        penstock.cut_between_modules(layers(), 2, layers=["0", "1", "2", nn.Linear(WIDTH, WIDTH)])


def test_split_spec_that_is_no_mapping_is_rejected() -> None:
    with pytest.raises(PartitionError, match=r"split_spec is \['1'\]. Expected a mapping from"):
        penstock.cut(layers(), (X,), split_spec=["1"])


def test_missing_and_unknown_arguments_are_named() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x * scale

    pipe = penstock.cut(Net(), (X,), {"scale": X})
    message = r"traced with 1 positional arguments, scale=, but called with 2 positional arguments"
    with pytest.raises(StageError, match=message):
        pipe(X, X)
    with pytest.raises(StageError, match=r"but called with 1 positional arguments, shift=\."):
        pipe(X, shift=X)


def test_random_value_is_drawn_once_for_all_stages_that_use_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(2)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(WIDTH)
            return self.layers[1](self.layers[0](x) + noise) * noise

    model = Net()
    pipe = penstock.cut(model, (X,), split_spec={"layers.1": SplitPoint.BEGINNING})
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    assert torch.equal(expected, pipe(X))


def test_value_that_several_stages_use_goes_from_one_to_the_next() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(3)

        def forward(self, x: Tensor) -> Tensor:
            everywhere = h = x.sin()
            for layer in self.layers:
                h = layer(h) + everywhere
            return h

    spec = {name: SplitPoint.BEGINNING for name in ("layers.1", "layers.2")}
    info = penstock.cut(Net(), (X,), split_spec=spec).info()
    assert ("sin float32[2, 4]", "add float32[2, 4]") == info.stages[1].receives
    assert ("sin float32[2, 4]", "add_1 float32[2, 4]") == info.stages[2].receives


def test_copy_of_a_frozen_parameter_is_frozen() -> None:
    model = layers(2)
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    pipe = penstock.cut(model, (X,), split_spec={"1": SplitPoint.BEGINNING})
    copied = pipe.get_stage_module(1).get_parameter("1.weight")
    assert copied is not model[1].weight
    assert not copied.requires_grad


def test_convolution_that_pads_in_an_operation_of_its_own_pads_once() -> None:
    x = torch.randn(2, 3, WIDTH)
    convolution = nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(convolution, nn.Linear(WIDTH, WIDTH))
    pipe = penstock.cut(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    assert torch.equal(model(x), pipe(x))


def test_module_with_another_forward_put_in_its_place_runs_that_once() -> None:
    model = layers(2)
    linear = model[0]
    linear.forward = lambda x: functional.linear(2 * x, linear.weight, linear.bias)
    pipe = penstock.cut(model, (X,), split_spec={"1": SplitPoint.BEGINNING})
    assert torch.equal(model(X), pipe(X))
