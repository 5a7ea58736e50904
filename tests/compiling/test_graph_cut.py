"""What each half of a compiled backward computes and keeps."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from interpreted_code import interpret
from penstock.backward import SplitEngine
from penstock.compiling import compiled_backward
from penstock.compiling.graph_cut import cut_graph
from penstock.compiling.split_backend import SplitBackend

ROWS, WIDTH = 6, 4


class Halves:
    """The graphs of one region: of the forward, and of the halves of its backward."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def keep(self, module: fx.GraphModule, inputs: Any, **details: Any) -> Callable[..., Any]:
        self.graphs.append(module)
        return interpret(module, inputs, **details)

    def nodes(self, half: int, *names: str) -> list[fx.Node]:
        nodes = self.graphs[half].graph.nodes
        return [node for node in nodes if str(node.target) in [f"aten.{name}" for name in names]]

    def count(self, half: int, *names: str) -> int:
        return len(self.nodes(half, *names))

    def inputs(self, half: int) -> list[tuple[int, ...]]:
        nodes = self.graphs[half].graph.nodes
        return [tuple(n.meta["val"].shape) for n in nodes if n.op == "placeholder"]


INPUT_HALF, WEIGHT_HALF = 1, 2


def run(module: nn.Module, *inputs: Tensor, memory_budget: float | None = None) -> Halves:
    """Split the backward of a compiled module; compare its gradients with those of autograd."""
    torch._dynamo.reset()
    halves = Halves()
    backend = SplitBackend((), memory_budget, halves.keep)
    engine = SplitEngine(torch.compile(module, backend=backend, dynamic=False))  # type: ignore[arg-type]
    grads = []
    for is_split in (True, False):
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        module.zero_grad()
        for _ in range(2):  # The second adds to what the first has left.
            if is_split:
                pending = engine.forward(*given)
                seed = torch.ones_like(pending.outputs)
                _, weights = pending.backward_input(seed)
                weights.run()
                assert torch.equal(torch.ones_like(seed), seed)
            else:
                module(*given).backward(torch.ones_like(seed))
        grads.append([param.grad for param in module.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    return halves


def rows(width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, width, dtype=torch.float64, requires_grad=True)


def doubles(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules).double()


def test_products_and_biases_of_weights_wait() -> None:
    halves = run(doubles(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), rows())
    assert 2 == halves.count(INPUT_HALF, "mm.default")
    assert 0 == halves.count(INPUT_HALF, "sum.dim_IntList")
    assert 2 == halves.count(WEIGHT_HALF, "mm.default", "addmm.default")
    assert 2 == halves.count(WEIGHT_HALF, "sum.dim_IntList")


def test_the_weight_half_takes_the_inputs_and_gradients_of_layers_and_no_more() -> None:
    halves = run(doubles(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), rows())
    # Each layer's input and the gradient of its output; no view of them, and no parameter.
    expected = [(ROWS, WIDTH), (ROWS, WIDTH), (ROWS, 8), (ROWS, 8)]
    assert expected == sorted(halves.inputs(WEIGHT_HALF))


def test_no_view_is_kept_beside_what_it_views() -> None:
    module = doubles(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    halves = run(module, x)
    (outputs,) = halves.graphs[INPUT_HALF].graph.output_node().args
    views = halves.nodes(INPUT_HALF, "view.default", "permute.default", "_unsafe_view.default")
    assert views
    # The gradient of the input, which may be a view, is the first; what is made for W follows.
    assert not set(outputs[1:]) & set(views)  # type: ignore[arg-type]  # nodes


def test_norms_are_computed_early_as_waiting_would_keep_more() -> None:
    halves = run(doubles(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), rows())
    assert 2 == len([shape for shape in halves.inputs(WEIGHT_HALF) if shape == (ROWS, WIDTH)])
    assert 1 == halves.count(WEIGHT_HALF, "mm.default")


def test_values_of_parameters_are_used_early() -> None:
    """They may be freed before the weight half runs, as FSDP2 does."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.scale)

    # Without memory for activations, the layer's input is computed again, from the scale.
    halves = run(Scaled(), rows(), memory_budget=0)
    assert (WIDTH,) not in halves.inputs(WEIGHT_HALF)
    assert 1 == halves.count(WEIGHT_HALF, "mm.default")


def test_both_gradients_of_a_convolution_are_computed_once() -> None:
    module = doubles(nn.Conv1d(2, 3, 3))
    halves = run(module, torch.randn(2, 2, 9, dtype=torch.float64, requires_grad=True))
    for half, asked in ((INPUT_HALF, [True, False, False]), (WEIGHT_HALF, [False, True, True])):
        (node,) = halves.nodes(half, "convolution_backward.default")
        assert asked == node.args[-1]


class Sums(nn.Module):
    """Two parameters with one gradient, and one whose gradient is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.a + self.b + self.c


def test_gradients_that_are_one_value_do_not_share_memory() -> None:
    torch._dynamo.reset()
    module = Sums()
    engine = SplitEngine(torch.compile(module, backend=SplitBackend(make_code=interpret)))  # type: ignore[arg-type]
    seed = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    _, weights = engine.forward(rows()).backward_input(seed)
    weights.run()
    grads = [param.grad for param in module.parameters()]
    tensors = [seed, *(grad for grad in grads if grad is not None)]
    assert 6 == len(tensors) == len({tensor.data_ptr() for tensor in tensors})


def test_dropout_is_the_same_in_both_halves() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(functional.dropout(x, 0.5))

    torch._dynamo.reset()
    module, x = Noisy(), rows()
    engine = SplitEngine(torch.compile(module, backend=SplitBackend(make_code=interpret)))  # type: ignore[arg-type]
    grads = []
    for is_split in (True, False):
        module.zero_grad()
        torch.manual_seed(1)
        if is_split:
            _, weights = engine.forward(x).backward_input(torch.ones(ROWS, WIDTH).double())
            weights.run()
        else:
            engine.module(x).backward(torch.ones(ROWS, WIDTH).double())
        grads.append([param.grad for param in module.parameters()])
    assert all(map(torch.equal, *grads))


def test_region_without_products_runs_whole() -> None:
    halves = run(doubles(nn.LayerNorm(WIDTH)), rows())
    assert 2 == len(halves.graphs)  # A forward and a backward.


def test_one_node_that_is_the_gradient_of_two_weights_does_not_wait() -> None:
    """Both would get the same memory; autograd copies it."""
    graph = fx.Graph()
    grad, x = graph.placeholder("grad"), graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.mm.default, (grad, x))
    dw = graph.call_function(torch.ops.aten.mm.default, (x, grad))
    dx = graph.call_function(torch.ops.aten.tanh.default, (grad,))
    graph.output((dx, both, both, dw))
    cut = cut_graph(graph, [dx, both, both, dw], [False, True, True, True], ())
    assert cut is not None
    assert [3] == cut.late_outputs


def test_random_numbers_of_a_backward_are_drawn_early() -> None:
    graph = fx.Graph()
    grad, x = graph.placeholder("grad"), graph.placeholder("x")
    noise = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    noisy = graph.call_function(torch.ops.aten.mul.Tensor, (x, noise))
    dw = graph.call_function(torch.ops.aten.mm.default, (grad, noisy))
    dx = graph.call_function(torch.ops.aten.tanh.default, (grad,))
    graph.output((dx, dw))
    cut = cut_graph(graph, [dx, dw], [False, True], ())
    assert cut is not None
    assert [noise] == cut.made
    names = [str(node.target) for node in cut.weight_half.nodes if node.op == "call_function"]
    assert ["aten.mul.Tensor", "aten.mm.default"] == names


def test_region_whose_gradients_torch_does_not_name_runs_whole_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with DTensors, of whose gradients the graph has parts."""
    monkeypatch.setattr(compiled_backward, "argument_of_gradient", lambda _: None)
    expected = (
        "its backward cannot be split. Its parameters are DTensors or other subclasses, whose "
        "gradients the compiled graph has in parts. It runs whole, in the input backward: "
        "gradients are right, but bubbles stay idle. To split it, leave this part uncompiled."
    )
    with pytest.warns(UserWarning, match=re.escape(expected)) as seen:
        halves = run(doubles(nn.Linear(WIDTH, WIDTH)), rows())
    assert 1 == len([each for each in seen if expected in str(each.message)])
    assert 2 == len(halves.graphs)


# torch's compiler causes it itself, where a function is given a tensor that is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_region_without_parameters_runs_whole_while_the_rest_is_split() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()
            self.square = torch.compile(
                lambda x: x @ x.T, backend=SplitBackend(make_code=interpret)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.layer(x))

    torch._dynamo.reset()
    module, x = Scores(), rows()
    _, weights = SplitEngine(module).forward(x).backward_input(torch.ones(ROWS, ROWS).double())
    assert module.layer.weight.grad is None
    weights.run()
    found, module.layer.weight.grad = module.layer.weight.grad, None
    y = module.layer(x)
    (y @ y.T).sum().backward()
    torch.testing.assert_close(module.layer.weight.grad, found, rtol=1e-12, atol=1e-12)


def test_gradients_that_are_parts_of_another_do_not_share_its_memory() -> None:
    """Each would have been added into the others, from the second microbatch on."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.upper = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))
            self.lower = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))
            self.whole = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (torch.cat([self.upper, self.lower]) + self.whole).T

    run(Parts(), rows())


def test_backward_that_changes_a_buffer_is_not_cut() -> None:
    """The weight half would read what the input half has written."""
    graph = fx.Graph()
    grad, buffer = graph.placeholder("grad"), graph.placeholder("buffer")
    dw = graph.call_function(torch.ops.aten.mm.default, (grad, buffer))
    dx = graph.call_function(torch.ops.aten.tanh.default, (grad,))
    graph.call_function(torch.ops.aten.copy_.default, (buffer, dx))
    graph.output((dx, dw))
    assert cut_graph(graph, [dx, dw], [False, True], ()) is None


def test_inputs_of_halves_have_names_that_no_other_graph_has() -> None:
    """Inductor's cache finds code by its graph, whether or not the code overwrites its inputs."""
    halves = run(doubles(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), rows())
    for half in (INPUT_HALF, WEIGHT_HALF):
        names = [n.name for n in halves.graphs[half].graph.nodes if n.op == "placeholder"]
        assert all(name.startswith("unchanged_") for name in names)


def test_weight_half_that_needs_values_of_a_frozen_parameter_says_so() -> None:
    """FSDP2 frees them too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH).double(), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(WIDTH, 1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.frozen * self.scale)

    torch._dynamo.reset()
    engine = SplitEngine(torch.compile(Scaled(), backend=SplitBackend(make_code=interpret)))  # type: ignore[arg-type]
    engine.forward(rows()).backward_input(torch.ones(ROWS, WIDTH).double())
    assert engine.needs_parameters


def test_weight_half_takes_all_sizes() -> None:
    """Without them, inductor's cache failed in the next process: a guard named what was missing."""
    graph = fx.Graph()
    size, grad, x = (graph.placeholder(name) for name in ("size", "grad", "x"))
    size.meta["val"] = 3
    dw = graph.call_function(torch.ops.aten.mm.default, (grad, x))
    dx = graph.call_function(torch.ops.aten.tanh.default, (grad,))
    graph.output((dx, dw))
    cut = cut_graph(graph, [dx, dw], [False, True], ())
    assert cut is not None
    assert [0, 1, 2] == cut.passed
