"""Models that a pipeline may meet: odd messages, odd stages, odd sizes; as the unsplit model."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from split_model import assert_same, make_schedule, run_pipeline, run_whole
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuzzing import rotated
from penstock.errors import PipelineError

WIDTH = 4
SCHEDULES = {"1F1B": 3, "GPipe": 2, "ZB-H1": 4, "ZB-V": 4, "DualPipeV": 4, "V-Min": 4}
# Split backwards for the models that meet full ones above, and the other way round.
DYNAMIC_SCHEDULES = ["ZB-V", "ZB-V", "1F1B", "1F1B", "1F1B", "1F1B"]


class Calls(nn.Module):
    """A linear layer, and what is done with it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


class Bare(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Registered:
    a: Any
    b: Any


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.a, value.b], None),
    lambda leaves, _: Registered(*leaves),
    serialized_type_name="penstock.tests.Registered",
)


@dataclass
class Unknown:
    """torch was not told of it."""

    a: Tensor


class OwnDict(dict[str, Tensor]):
    """torch was not told of it either."""


class WithParameter(nn.Module):
    """Hands on a parameter beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


class Counting(nn.Module):
    """Hands on a buffer that the next forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.linear(x), self.count


class Seeded(nn.Module):
    """Dropout that draws by what it is given, so that it is the same in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(x.detach().abs().sum() * 1e6) % 1000)
            y: Tensor = nn.functional.dropout(self.linear(x), 0.5)
        return y


def _plain() -> Calls:
    return Calls(lambda linear, x: linear(x).tanh())


def _twice(y: Any) -> tuple[Any, Any]:
    return y, y


_TIED = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
# Names of Calls stand for the tensors that they take, and `linear` for the layer of the stage.
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "tuple of one": lambda: [
        Calls(lambda linear, x: (linear(x),)),
        Calls(lambda linear, x: [linear(x).tanh()]),
        _plain(),
        Calls(lambda linear, x: (linear(x),)),
    ],
    "same tensor twice": lambda: [
        Calls(lambda linear, x: _twice(linear(x))),
        Calls(lambda linear, x, y: linear(x) * y),
        Calls(lambda linear, x: [linear(x)] * 3),
        Calls(lambda linear, x, y, z: linear(x * y + z)),
    ],
    "input itself": lambda: [
        nn.Identity(),
        Calls(lambda linear, x: (x, linear(x))),
        Calls(lambda linear, x, y: (x, y, linear(x) + y)),
        Calls(lambda linear, x, y, z: linear(x + y * z)),
    ],
    "view of the input": lambda: [
        _plain(),
        Bare(lambda x: x[:, 1:3]),
        Calls(lambda linear, x: linear(x.repeat(1, 2)).view(-1, 2, 2)),
        Calls(lambda linear, x: linear(x.flatten(1))),
    ],
    "nothing among outputs": lambda: [
        Calls(lambda linear, x: (linear(x), None)),
        Calls(lambda linear, x, n: (None, linear(x), n, [])),
        Calls(lambda linear, n, x, k, e: {"x": linear(x), "n": None, "e": ()}),
        Calls(lambda linear, d: linear(d["x"])),
    ],
    "no output at all": lambda: [
        Calls(lambda linear, x: ()),
        Calls(lambda linear: linear.weight.tanh()),
        _plain(),
        _plain(),
    ],
    "dicts": lambda: [
        Calls(lambda linear, x: {"b": linear(x), "a": {"c": [x, linear(x) * 2]}}),
        Calls(lambda linear, d: {"q": d["b"] + d["a"]["c"][1], "z": linear(d["a"]["c"][0])}),
        Calls(lambda linear, d: collections.OrderedDict(y=linear(d["q"] * d["z"]))),
        Calls(lambda linear, d: {"out": linear(d["y"]), "in": d["y"]}),
    ],
    "named tuples": lambda: [
        Calls(lambda linear, x: Pair(linear(x), x)),
        Calls(lambda linear, t: Pair(t.b + linear(t.a), t.a)),
        Calls(lambda linear, t: Pair(linear(t.a * t.b), 3)),
        Calls(lambda linear, t: Pair(linear(t.a) * t.b, t.a)),
    ],
    "registered dataclass": lambda: [
        Calls(lambda linear, x: Registered(linear(x), x)),
        Calls(lambda linear, t: Registered(t.b + linear(t.a), t.a)),
        Calls(lambda linear, t: Registered(linear(t.a), t.b)),
        Calls(lambda linear, t: Registered(linear(t.a) * t.b, "end")),
    ],
    "zero-size tensors": lambda: [
        Calls(lambda linear, x: (linear(x), x[:0], linear(x)[:, :0])),
        Calls(lambda linear, x, e, f: (linear(x), f, e)),
        Calls(lambda linear, x, f, e: (linear(x) + f.sum(), f)),
        Calls(lambda linear, x, f: linear(x)),
    ],
    "tensors without dims": lambda: [
        Calls(lambda linear, x: (linear(x), linear(x).mean())),
        Calls(lambda linear, x, s: (linear(x) * s, s)),
        Calls(lambda linear, x, s: linear(x).sum() * s),
        Calls(lambda linear, s: linear(s.expand(2, WIDTH))),
    ],
    "bool, int and other values": lambda: [
        Calls(lambda linear, x: (linear(x), x > 0, x.long())),
        Calls(lambda linear, x, m, i: (linear(x) * m, m, i)),
        Calls(lambda linear, x, m, i: (linear(x), m.int(), i, "s", 2.5, True, torch.float16)),
        Calls(lambda linear, x, m, i, s, f, t, d: linear(x) * m * f),
    ],
    "narrow dtypes": lambda: [
        Calls(lambda linear, x: linear(x).bfloat16()),
        Calls(lambda linear, x: linear(x.double()).half()),
        Calls(lambda linear, x: linear(x.double()).float()),
        Calls(lambda linear, x: linear(x.double())),
    ],
    "complex": lambda: [
        Calls(lambda linear, x: torch.complex(linear(x), x)),
        Calls(lambda linear, z: torch.complex(linear(z.real), linear(z.imag)).conj()),
        Calls(lambda linear, z: (z * z).conj() + torch.complex(linear(z.real), z.imag)),
        Calls(lambda linear, z: linear(z.real) + z.imag),
    ],
    "not contiguous": lambda: [
        Calls(lambda linear, x: linear(x).t()),
        Calls(lambda linear, x: linear(x.t())[:, ::2]),
        Calls(lambda linear, x: linear(x.repeat(1, 2))[:, :1].expand(-1, WIDTH)),
        _plain(),
    ],
    "channels last": lambda: [
        Calls(
            lambda linear, x: linear(x)[:, :, None, None]
            .expand(-1, -1, 2, 3)
            .contiguous(memory_format=torch.channels_last)
        ),
        Bare(lambda x: x * 2),
        Calls(lambda linear, x: linear(x.mean((2, 3)))),
        _plain(),
    ],
    "stages without parameters": lambda: [
        Bare(lambda x: x * 2),
        _plain(),
        Bare(torch.tanh),
        Bare(lambda x: x + 1),
    ],
    "one stage with parameters": lambda: [nn.Identity(), nn.Identity(), _plain(), nn.Identity()],
    "frozen stages": lambda: [
        _plain().requires_grad_(False),
        _plain(),
        _plain().requires_grad_(False),
        _plain(),
    ],
    "tied weights": lambda: [_TIED, nn.Tanh(), _TIED, _TIED],
    "tied weights of a V": lambda: [_TIED, _plain(), _plain(), _TIED],
    "output that is a parameter": lambda: [
        WithParameter(),
        Calls(lambda linear, x, w: (linear(x), w)),
        Calls(lambda linear, x, w: (linear(x * w), w, linear.bias)),
        Calls(lambda linear, x, w, b: linear(x) + w * b),
    ],
    "only a parameter": lambda: [
        _plain(),
        Calls(lambda linear, x: linear.weight),
        Calls(lambda linear, w: linear(w)),
        _plain(),
    ],
    "unused outputs": lambda: [
        Calls(lambda linear, x: (linear(x), linear(x) * 2)),
        Calls(lambda linear, x, y: linear(x)),
        Calls(lambda linear, x: (linear(x).detach(), linear(x))),
        Calls(lambda linear, x, y: linear(y)),
    ],
    "stage that uses no input": lambda: [
        _plain(),
        Calls(lambda linear, x: linear.weight.sum() + x.detach()),
        _plain(),
        _plain(),
    ],
    "stage that stops gradients": lambda: [
        _plain(),
        Calls(lambda linear, x: linear(x).detach()),
        _plain(),
        _plain(),
    ],
    "in place on its own": lambda: [
        Calls(lambda linear, x: linear(x).relu_()),
        Calls(lambda linear, x: linear(x.clone().mul_(2)).mul_(2)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.ReLU(inplace=True)),
        Calls(lambda linear, x: linear(x).add_(1)),
    ],
    "evaluation mode": lambda: [
        nn.Sequential(_plain(), nn.Dropout(0.5)).eval(),
        nn.BatchNorm1d(WIDTH, dtype=torch.float64).eval(),
        nn.Sequential(_plain(), nn.Dropout(0.9)).eval(),
        _plain(),
    ],
    "dropout": lambda: [Seeded(), Seeded(), Seeded(), Seeded()],
}  # fmt: skip


def _batch(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH, dtype=torch.float64),)


def _compare(modules: list[nn.Module], name: str, m: int, rows: int, **kwargs: Any) -> None:
    schedule = make_schedule(name, len(modules), m)
    batch = _batch(rows)
    expected = run_whole(modules, batch, m)
    assert_same(expected, run_pipeline(modules, schedule, batch, **kwargs))


@rotated(name=list(SCHEDULES), model=list(MODELS))
def test_an_odd_model_trains_as_if_it_were_not_split(name: str, model: str) -> None:
    m = SCHEDULES[name]
    _compare(MODELS[model](), name, m, rows=2 * m + 1)


@rotated(name=DYNAMIC_SCHEDULES, model=list(MODELS))
def test_an_odd_model_trains_with_dynamic_shapes(name: str, model: str) -> None:
    m = SCHEDULES[name]
    _compare(MODELS[model](), name, m, rows=2 * m + 1, stage_kwargs={"dynamic_shapes": True})


@pytest.mark.parametrize("model", list(MODELS))
def test_an_odd_model_is_evaluated_as_if_it_were_not_split(model: str) -> None:
    modules, batch = MODELS[model](), _batch(7)
    schedule = make_schedule("1F1B", len(modules), 3)
    expected = run_whole(modules, batch, 3, loss_fn=None)
    actual = run_pipeline(modules, schedule, batch, loss_fn=None)
    assert all(grad is None for grads in actual.grads for grad in grads.values())
    assert_same(expected, actual)


@rotated(
    num_cases=9,
    name=["1F1B", "GPipe", "ZB-H1", "ZB-H2", "Interleaved1F1B"],
    num_stages=[1, 2, 4],
    m=[1, 2, 5],
)
def test_few_microbatches_and_few_ranks_train_as_if_it_were_not_split(
    name: str, num_stages: int, m: int
) -> None:
    _compare([_plain() for _ in range(num_stages)], name, m, rows=max(m, 5))


@pytest.mark.parametrize("m", [3])
def test_a_single_rank_without_a_loss_only_runs_forward(m: int) -> None:
    modules, batch = [_plain()], _batch(4)
    actual = run_pipeline(modules, make_schedule("1F1B", 1, m), batch, loss_fn=None)
    assert_same(run_whole(modules, batch, m, loss_fn=None), actual)


def test_one_row_per_microbatch_and_empty_rows_train() -> None:
    modules = [Calls(lambda linear, x: linear(x)[:0]), _plain(), _plain()]
    _compare(modules, "1F1B", 3, rows=3)


@pytest.mark.parametrize(("name", "place"), [("1F1B", 0), ("ZB-V", 0), ("ZB-V", 1)])
def test_a_buffer_that_changes_in_every_forward_arrives_as_it_was(name: str, place: int) -> None:
    """A stage runs ahead: what the next one received was the count of a later microbatch.

    In a V, stages 1 and 2 are on one rank, and nothing is sent between them.
    """
    modules: list[nn.Module] = [_plain() for _ in range(4)]
    modules[place : place + 2] = [Counting(), Calls(lambda linear, x, n: linear(x) * n)]
    _compare(modules, name, 4, rows=8)


class UsedAtFirst(nn.Module):
    """Uses its second input in the two microbatches of the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.num_calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.num_calls += 1
        z: Tensor = self.linear(x)
        return z * y if self.num_calls <= 2 else z


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_an_output_that_is_no_longer_used_has_a_gradient_of_zeros(name: str) -> None:
    """Its receiver expects a gradient, as the first step had one."""
    modules = [Calls(lambda linear, x: (x, linear(x))), UsedAtFirst()]
    _compare(modules, name, 2, rows=4)


@pytest.mark.parametrize("make", [Unknown, lambda y: OwnDict(a=y)], ids=["object", "dict"])
def test_tensors_in_what_torch_cannot_look_into_are_rejected(make: Callable[..., Any]) -> None:
    modules = [
        Calls(lambda linear, x: make(linear(x))),
        Calls(lambda linear, t: linear(t.a if isinstance(t, Unknown) else t["a"])),
    ]
    with pytest.raises(PipelineError, match="a tensor in an object that torch cannot look into"):
        run_pipeline(modules, make_schedule("1F1B", 2, 2), _batch(4), num_steps=1)


class Noting:
    """Not a tensor, and changes."""

    def __init__(self) -> None:
        self.count = 0


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note = Noting()

    def forward(self, x: Tensor) -> tuple[Tensor, Noting]:
        self.note.count += 1
        return x, self.note


def test_a_value_that_changes_in_place_is_rejected_or_arrives() -> None:
    modules = [Notes(), Calls(lambda linear, x, note: linear(x) * note.count)]
    expected = run_whole(modules, batch := _batch(4), 2)
    try:
        actual = run_pipeline(modules, make_schedule("1F1B", 2, 2), batch)
    except PipelineError:
        return
    assert_same(expected, actual)


@pytest.mark.parametrize("make", [lambda: torch.arange(3).numpy(), lambda: float("nan")])
def test_a_value_that_is_the_same_in_all_steps_may_be_an_array_or_nan(
    make: Callable[[], Any],
) -> None:
    modules = [
        Calls(lambda linear, x: (linear(x), make())),
        Calls(lambda linear, x, value: linear(x)),
    ]
    _compare(modules, "1F1B", 2, rows=4)


@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_a_stage_that_changes_its_input_in_place_says_where(name: str) -> None:
    """A stage differentiates by its inputs, which torch does not allow to be changed."""
    modules = [_plain(), nn.ReLU(inplace=True), _plain(), _plain()]
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as caught:
        run_pipeline(modules, make_schedule(name, 4, 4), _batch(8))
    assert ["in 1F0 (forward of microbatch 0 on stage 1), on rank 1"] == caught.value.__notes__


def test_a_sparse_output_is_rejected_with_its_place() -> None:
    modules = [Calls(lambda linear, x: linear(x).to_sparse()), Bare(lambda x: x.to_dense())]
    with pytest.raises(PipelineError, match="stage 0, microbatch 0"):
        run_pipeline(modules, make_schedule("1F1B", 2, 2), _batch(4))
