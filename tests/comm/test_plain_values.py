"""Values between ranks: what is sent arrives as it was, and reading it runs nothing."""

import contextlib
import enum
import json
import math
import os
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from fuzzing import IS_LONG
from penstock import CostTable, schedules
from penstock.comm.plain_values import of_bytes, to_bytes
from penstock.errors import CommError, ScheduleError

Pair = namedtuple("Pair", ["one", "other"])  # As users may have them.


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    made: int = field(init=False, default=3)


SCHEDULE = schedules.get("ZB-V")(num_ranks=2, num_microbatches=3)
VALUES = [
    *(None, True, 3, -(2**70), 0.1, -0.0, math.inf, "a\ud800", b"\xff", bytearray(b"1"), 2 - 1j),
    *([1, [2]], (1, (2,)), {1: "a", ("b", 2): [3]}, {1, 2}, frozenset((3,)), range(3), slice(1, 2)),
    *(..., torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.strided),
    *(Pair(1, [2]), Colour.RED, Point(2.0), OrderedDict(b=1, a=2)),
    *(Shard(1), Replicate(), Partial("sum"), SCHEDULE, SCHEDULE.placement),
    *(CostTable.uniform(4, bandwidth=2), np.float64(0.5), {"format": "x"}, {"tuple": [1]}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_arrives_as_it_was(value: Any) -> None:
    found = of_bytes(to_bytes(value))
    assert type(value) is type(found)
    assert value == found
    assert repr(value) == repr(found)


@dataclass
class Results(OrderedDict[str, Any]):
    """As transformers has them: a dataclass and a dict, which pytree knows."""

    loss: Any = None

    def __post_init__(self) -> None:
        self["loss"] = self.loss


pytree.register_pytree_node(
    Results, lambda value: (list(value.values()), None), lambda values, _: Results(*values)
)


def test_container_that_is_a_dataclass_arrives_as_it_was() -> None:
    found = of_bytes(to_bytes(Results([1, 2])))
    assert Results is type(found)
    assert {"loss": [1, 2]} == found


def test_nan_arrays_and_errors_arrive_as_they_were() -> None:
    assert math.isnan(of_bytes(to_bytes(math.nan)))
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    found = of_bytes(to_bytes(array))
    assert array.dtype == found.dtype
    assert np.array_equal(array, found)
    error = of_bytes(to_bytes(ScheduleError("no such thing")))
    assert (ScheduleError, "no such thing") == (type(error), str(error))


class Hidden:
    pass


@pytest.mark.parametrize("value", [Hidden(), os.system, (Hidden,), object(), [torch.ones(1)]])
def test_value_that_is_more_than_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"holds more than data\. Expected|contains a tensor"):
        to_bytes(value)


@pytest.mark.parametrize(
    "sent",
    [
        {"record": ["os", "system", {}]},
        {"record": ["subprocess", "Popen", {"args": "x"}]},
        {"record": ["not_loaded_anywhere", "Thing", {}]},
        {"record": [Point.__module__, "Point", {"x": 1}]},
        {"named": ["subprocess", "Popen", []]},
        {"named": [Pair.__module__, "Pair", [1]]},
        {"member": ["subprocess", "Popen", "x"]},
        {"node": ["subprocess", "Popen", [], None]},
        {"error": ["PipelineError.__init__", []]},
        {"error": ["Mapping", []]},
        {"placement": ["Placement", []]},
        {"dtype": "load"},
        {"layout": "float32"},
        {"call": ["os.system", "x"]},
        {"a": 1, "b": 2},
        {},
    ],
    ids=json.dumps,
)
def test_what_nobody_sends_is_refused(sent: Any) -> None:
    with pytest.raises(CommError, match=r"a value from another rank cannot be read \(\w+Error"):
        of_bytes(json.dumps(sent).encode())


@pytest.mark.fuzz
def test_damaged_bytes_are_read_or_refused() -> None:
    rng = random.Random(None if IS_LONG else 0)
    whole = to_bytes(VALUES)
    for _ in range(20_000 if IS_LONG else 100):
        begin = rng.randrange(len(whole))
        end = begin + rng.choice((0, 1, 9))
        damaged = whole[:begin] + rng.randbytes(rng.choice((0, 1, 3))) + whole[end:]
        with contextlib.suppress(CommError):
            of_bytes(damaged)
