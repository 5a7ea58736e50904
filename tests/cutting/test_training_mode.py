"""train() and eval() of a traced stage do what they do for the model."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from limits import HANG_S
from penstock import Pipe, pipe_split

WIDTH = 4
X = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))


class Wrapped(nn.Module):
    """A module between two layers, and a cut before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        pipe_split()
        h = self.inner(h)
        return self.last(h)


class Call(nn.Module):
    """A function of a module and a tensor, as a module."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def _attention(need_weights: bool) -> nn.Module:
    def run(call: Any, x: Tensor) -> Tensor:
        return call.inner(x, x, x, need_weights=need_weights)[0]

    return Call(run, inner=nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True))


def _attention_function() -> nn.Module:
    def run(call: Any, x: Tensor) -> Tensor:
        dropout_p = 0.5 if call.training else 0.0
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)

    return Call(run)


def _dropout_function() -> nn.Module:
    return Call(lambda call, x: functional.dropout(x, 0.5, call.training))


def _in_autocast(inner: nn.Module) -> nn.Module:
    def run(call: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return call.inner(x)

    return Call(run, inner=inner)


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU]) -> nn.Module:
    inner = kind(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
    return Call(lambda call, x: call.inner(x)[0], inner=inner)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "dropout function": _dropout_function,
    "feature dropout": lambda: nn.Dropout1d(0.5),
    "feature dropout in place": lambda: nn.Dropout1d(0.5, inplace=True),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "alpha dropout in place": lambda: nn.AlphaDropout(0.5, inplace=True),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm1d(WIDTH),
    "instance norm with statistics": lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
    "dropout in autocast": lambda: _in_autocast(nn.Dropout(0.5)),
    "batch norm in autocast": lambda: _in_autocast(nn.BatchNorm1d(WIDTH)),
    "rrelu": nn.RReLU,
    "lstm": lambda: _recurrent(nn.LSTM),
    "gru": lambda: _recurrent(nn.GRU),
    "attention": lambda: _attention(True),
    "attention without weights": lambda: _attention(False),
    "attention function": _attention_function,
    "transformer layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True),
}


def make(name: str, *, is_training: bool = True) -> tuple[nn.Module, Pipe]:
    """A model and a pipe of an equal one."""
    model = Wrapped(MODULES[name]()).train(is_training)
    with warnings.catch_warnings():
        # torch.export warns of what nn.RNNBase does with its list of weights.
        warnings.filterwarnings("ignore", "The tensor attributes? self.*_flat_weights")
        pipe = penstock.cut(copy.deepcopy(model), (X,))
    assert 2 == pipe.num_stages
    return model, pipe


def set_training(model: nn.Module, pipe: Pipe, is_training: bool) -> None:
    model.train(is_training)
    for index in range(pipe.num_stages):
        pipe.get_stage_module(index).train(is_training)


def assert_same(model: nn.Module, pipe: Pipe) -> None:
    """The same outputs, and the same statistics afterwards."""
    torch.manual_seed(5)
    expected = model(X)
    torch.manual_seed(5)
    assert torch.equal(expected, pipe(X))
    state = model.state_dict()
    for index in range(pipe.num_stages):
        for key, value in pipe.get_stage_module(index).state_dict().items():
            assert torch.equal(state[key], value), key


@pytest.mark.parametrize("name", MODULES)
def test_stage_follows_eval_and_train(name: str) -> None:
    model, pipe = make(name)
    assert_same(model, pipe)
    assert_same(model, pipe)
    for is_training in (False, True, False):
        set_training(model, pipe, is_training)
        assert_same(model, pipe)


def test_norm_that_was_frozen_stays_so_in_training() -> None:
    model = Wrapped(nn.BatchNorm1d(WIDTH))
    model.inner.eval()
    pipe = penstock.cut(copy.deepcopy(model), (X,))
    for index in range(2):
        pipe.get_stage_module(index).train()
    assert_same(model, pipe)


@pytest.mark.parametrize("name", MODULES)
def test_model_traced_in_eval_stays_so(name: str) -> None:
    model, pipe = make(name, is_training=False)
    assert_same(model, pipe)
    for index in range(2):
        pipe.get_stage_module(index).train()
    assert_same(model, pipe)


def test_eval_of_a_pipeline_after_steps_is_that_of_the_model() -> None:
    model, pipe = make("batch norm")
    set_training(model, pipe, False)

    def main(group: penstock.LocalGroup) -> Tensor | None:
        stage = pipe.build_stage(group.rank, "cpu", group)
        return penstock.Pipeline([stage], "1F1B", num_microbatches=2, timeout=HANG_S).eval(
            torch.cat([X, X])
        )

    assert torch.equal(torch.cat([model(X), model(X)]), penstock.local_ranks(2, main)[-1])
