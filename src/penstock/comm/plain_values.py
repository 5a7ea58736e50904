"""Values between ranks as text that holds data alone, so that reading it runs nothing.

Other processes may reach the connections over which ranks exchange values, and unpickling runs what
the bytes name. Here, a value is JSON. What JSON lacks is an object with one key, its kind:

    (1, {2: "a"})    {"tuple": [1, {"dict": [[2, "a"]]}]}
    Forward(0, 1)    {"record": ["penstock.ir.action", "Forward", {"stage": 0, "mb": 1}]}

Records are dataclasses, named tuples and members of enums. Their classes must already be loaded
where they are read, and no code of theirs runs. Classes that are registered with pytree are built
by the function that was registered.
"""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from penstock import errors
from penstock.errors import CommError
from penstock.ir import LazyOrders
from penstock.torch_private import REGISTER_PYTREE_NODE, pytree

_AS_THEY_ARE: Final = frozenset((type(None), bool, int, float, str))
_PLACEMENTS: Final = {
    "Shard": ("dim",),
    "Replicate": (),
    "Partial": ("reduce_op",),
    "_StridedShard": ("dim", "split_factor"),
}
"""The placements of DTensors, and what each is made with."""


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes; raise a TypeError if it holds more than data."""
    return json.dumps(_pack(value), separators=(",", ":")).encode()


def of_bytes(content: bytes) -> Any:
    """Return the value that `to_bytes` was given."""
    try:
        return _unpack(json.loads(content))
    except Exception as exc:  # Bytes of any kind must not raise anything else.
        raise CommError(
            f"a value from another rank cannot be read ({type(exc).__name__}: {exc}). Expected "
            "ranks that run the same version of Penstock and have loaded the same modules."
        ) from exc


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_pack(each) for each in value]
    if (packer := _PACKERS.get(kind)) is not None:
        return packer(value)
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return {"node": [*_name_of(kind), _pack(list(children)), _pack(context)]}
    if isinstance(value, Enum):
        return {"member": [*_name_of(kind), value.name]}
    if is_dataclass(value):
        held = {field.name: _pack(getattr(value, field.name)) for field in fields(value)}
        return {"record": [*_name_of(kind), held]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": [*_name_of(kind), [_pack(each) for each in value]]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUmM":
        body = base64.b64encode(value.tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), body, kind is np.ndarray]}
    if isinstance(value, errors.PipelineError):
        return {"error": [kind.__name__, [_pack(each) for each in value.args]]}
    if kind.__name__ in _PLACEMENTS and kind.__module__.startswith("torch.distributed."):
        given = [_pack(getattr(value, name)) for name in _PLACEMENTS[kind.__name__]]
        return {"placement": [kind.__name__, given]}
    inside = value.values() if isinstance(value, dict) else ()
    if any(isinstance(each, torch.Tensor) for each in (value, *inside)):
        raise TypeError(
            "it contains a tensor in an object that torch cannot look into; register its class "
            f"with {REGISTER_PYTREE_NODE}, or return tuples or dicts"
        )
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} holds more than data. Expected numbers, texts, "
        "bytes, arrays, tuples, lists, dicts and sets, dataclasses, named tuples and enums of "
        "them, or a class that is registered with pytree"
    )


_PACKERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    tuple: lambda value: {"tuple": [_pack(each) for each in value]},
    LazyOrders: lambda value: {"tuple": [_pack(each) for each in value]},
    dict: lambda value: {"dict": [[_pack(key), _pack(each)] for key, each in value.items()]},
    set: lambda value: {"set": [_pack(each) for each in value]},
    frozenset: lambda value: {"frozenset": [_pack(each) for each in value]},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"bytearray": base64.b64encode(value).decode()},
    complex: lambda value: {"complex": [value.real, value.imag]},
    range: lambda value: {"range": [value.start, value.stop, value.step]},
    slice: lambda value: {"slice": [_pack(each) for each in (value.start, value.stop, value.step)]},
    type(...): lambda value: {"ellipsis": None},
    torch.Size: lambda value: {"size": list(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
}


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _unpack(value: Any) -> Any:
    kind = type(value)
    if kind is list:
        return [_unpack(each) for each in value]
    if kind is not dict:
        return value
    ((name, body),) = value.items()
    return _UNPACKERS[name](body)


def _class_of(module: str, name: str) -> Any:
    """Return a class that is loaded; importing it could run anything."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{module}.{name} is not a class")
    return found


def _read_record(body: Any) -> Any:
    module, name, held = body
    kind = _class_of(module, name)
    if not is_dataclass(kind) or {field.name for field in fields(kind)} != held.keys():
        raise TypeError(f"{module}.{name} is not a dataclass with the fields {list(held)}")
    record: Any = object.__new__(kind)  # type: ignore[arg-type]  # it is a class
    for field, value in held.items():
        object.__setattr__(record, field, _unpack(value))
    return record


def _read_named(body: Any) -> Any:
    module, name, values = body
    kind = _class_of(module, name)
    if not issubclass(kind, tuple) or len(kind._fields) != len(values):
        raise TypeError(f"{module}.{name} is not a named tuple with {len(values)} fields")
    return tuple.__new__(kind, map(_unpack, values))


def _read_member(body: Any) -> Any:
    module, name, member = body
    kind = _class_of(module, name)
    if not issubclass(kind, Enum):
        raise TypeError(f"{module}.{name} is not an enum")
    return kind.__members__[member]


def _read_node(body: Any) -> Any:
    module, name, children, context = body
    node = pytree.SUPPORTED_NODES[_class_of(module, name)]
    return node.unflatten_fn(_unpack(children), _unpack(context))


def _read_array(body: Any) -> Any:
    dtype, shape, content, is_array = body
    found = np.frombuffer(bytearray(base64.b64decode(content)), np.dtype(str(dtype))).reshape(shape)
    return found if is_array else found[()]


def _read_error(body: Any) -> Any:
    name, arguments = body
    kind = getattr(errors, name)
    if not issubclass(kind, errors.PipelineError):
        raise TypeError(f"{name} is not an error of Penstock")
    return kind(*map(_unpack, arguments))


def _read_placement(body: Any) -> Any:
    from torch.distributed.tensor import placement_types  # Late: it takes a while to load.

    name, values = body
    arguments = dict(zip(_PLACEMENTS[name], map(_unpack, values), strict=True))
    return getattr(placement_types, name)(**arguments)


def _read_of_torch(kind: type, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise TypeError(f"torch.{name} is not a {kind.__name__}")
    return found


_UNPACKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tuple": lambda body: tuple(map(_unpack, body)),
    "dict": lambda body: {_unpack(key): _unpack(each) for key, each in body},
    "set": lambda body: set(map(_unpack, body)),
    "frozenset": lambda body: frozenset(map(_unpack, body)),
    "bytes": base64.b64decode,
    "bytearray": lambda body: bytearray(base64.b64decode(body)),
    "complex": lambda body: complex(*body),
    "range": lambda body: range(*body),
    "slice": lambda body: slice(*map(_unpack, body)),
    "ellipsis": lambda body: ...,
    "size": torch.Size,
    "dtype": lambda body: _read_of_torch(torch.dtype, body),
    "device": torch.device,
    "layout": lambda body: _read_of_torch(torch.layout, body),
    "record": _read_record,
    "named": _read_named,
    "member": _read_member,
    "node": _read_node,
    "array": _read_array,
    "error": _read_error,
    "placement": _read_placement,
}
