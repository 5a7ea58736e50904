"""`penstock.compile` takes the options of torch.compile that a split backward allows."""

import re

import pytest
import torch
from torch import nn

import penstock
from interpreted_code import interpret
from penstock.backward import SplitEngine
from penstock.compiling.module_compiler import make_backend
from penstock.compiling.split_backend import SplitBackend
from penstock.errors import CompileError
from penstock.torch_private.compiler import compile_in_place


def refuses(text: str) -> "pytest.RaisesExc[CompileError]":
    return pytest.raises(CompileError, match=re.escape(text))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "aot_eager"}, "backend='aot_eager' was given, but only the code that"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' records CUDA graphs, in which"),
        ({"mode": "max-autotune"}, "Leave it out, or use mode='max-autotune-no-cudagraphs'."),
        (
            {"options": {"triton.cudagraphs": True}},
            "the option 'triton.cudagraphs' records CUDA graphs",
        ),
        (
            {"mode": "default", "options": {}},
            "mode='default' and options were both given. Expected one of them, as in torch",
        ),
        ({"memory_budget": 1.5}, "memory_budget is 1.5. Expected a share between 0"),
        ({"memory_budget": "0.5"}, "memory_budget is '0.5'. Expected a share between 0"),
        ({"memory_budget": -1}, "memory_budget is -1. Expected a share between 0"),
    ],
)
def test_option_that_cannot_be_split_is_refused(options: dict[str, object], text: str) -> None:
    with refuses(text):
        penstock.compile(nn.Linear(1, 1), **options)


def test_unknown_options_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option no_such"):
        penstock.compile(nn.Linear(1, 1), options={"no_such": 1})


def test_cuda_graphs_of_the_configuration_are_turned_off() -> None:
    assert ("triton.cudagraphs", False) in make_backend().options


def test_equal_options_make_equal_backends() -> None:
    """Otherwise torch would compile each of many equal blocks again."""
    assert make_backend() == make_backend()
    assert make_backend(options={"max_autotune": True}) != make_backend()
    assert make_backend(memory_budget=0.5) != make_backend()


# torch's compiler causes it itself, where a function is given a tensor that is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_equal_blocks_share_code() -> None:
    num_graphs = 0

    def counting(*args: object, **details: object) -> object:
        nonlocal num_graphs
        num_graphs += 1
        return interpret(*args, **details)  # type: ignore[arg-type]  # passed on as they are

    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(3)]
    for block in blocks:
        compile_in_place(block, backend=SplitBackend(make_code=counting))
    module = nn.Sequential(*blocks)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    _, weights = SplitEngine(module).forward(x).backward_input(torch.ones(2, 4).double())
    weights.run()
    assert 3 == num_graphs  # One forward, and two halves of a backward.
    found = [param.grad for param in module.parameters()]
    module.zero_grad()
    for block in blocks:
        block._compiled_call_impl = None
    module(x).backward(torch.ones(2, 4).double())
    torch.testing.assert_close([param.grad for param in module.parameters()], found)


def test_decorator_compiles_a_function() -> None:
    @penstock.compile(disable=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert 4 == double(torch.tensor(2)).item()
