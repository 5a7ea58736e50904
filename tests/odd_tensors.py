"""Tensors that a stage may return: those that arrive as they are, and those that are refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.masked import masked_tensor
from torch.utils import _pytree as pytree

Make = Callable[[Tensor], Tensor]


def numbers() -> Tensor:
    return torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)


class Tagged(Tensor):
    """A subclass that has memory of its own."""


class Wrapper(Tensor):
    """A subclass without memory: its values are in another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = pytree.tree_map_only(Wrapper, lambda wrapper: wrapper.inner, args)
        return pytree.tree_map_only(Tensor, Wrapper, func(*args, **(kwargs or {})))


def _functional(x: Tensor) -> Tensor:
    with FunctionalTensorMode():
        made: Tensor = FunctionalTensor.to_functional(x)
        return made


def _leaked(transform: Callable[..., Any], x: Tensor) -> Tensor:
    """A tensor of the inside of a transform."""
    found: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        found.append(y * 1)
        return y.sum()

    transform(keep)(x)
    return found[0]


def _freed(x: Tensor, num_bytes: int = 0) -> Tensor:
    """A tensor of which `num_bytes` are left."""
    x.untyped_storage().resize_(num_bytes)
    return x


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.detach() > 0).to(torch.uint8).view(dtype)


def _in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.detach() * 2


SENT: dict[str, Make] = {
    "plain": lambda x: x,
    "a collective's result": lambda x: AsyncCollectiveTensor(x.detach()),
    "transposed collective's result": lambda x: AsyncCollectiveTensor(x.detach().t()),
    "conjugate": lambda x: torch.complex(x, x * x).conj(),
    "negative": lambda x: torch.complex(x, x * x).conj().imag,
    "negative and contiguous": lambda x: torch.complex(x, x * x).sum().conj().imag,
    "zero size": lambda x: x[:0],
    "no dims": lambda x: x.sum(),
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(3, 4),
    "overlapping": lambda x: x.as_strided((5, 4), (1, 2)),
    "end of its storage": lambda x: x[2:],
    "float8": lambda x: x.detach().to(torch.float8_e4m3fn),
    "float4": lambda x: _bits(x, torch.float4_e2m1fn_x2),
    "uint4": lambda x: _bits(x, torch.uint4),
    "bits8": lambda x: _bits(x, torch.bits8),
    "uint16": lambda x: x.detach().abs().to(torch.uint16),
    "uint64": lambda x: x.detach().abs().to(torch.uint64),
    "bfloat16": lambda x: x.bfloat16(),
    "complex": lambda x: torch.complex(x, x * x),
    "bool": lambda x: x > 0,
    "expanded bool": lambda x: (x[:1] > 0).expand(3, 4),
    "inference tensor": _in_inference_mode,
    "parameter": lambda x: nn.Parameter(x.detach().clone()),
    "buffer": lambda x: nn.Buffer(x.detach()),
}


class Refused(NamedTuple):
    make: Make
    what: str


_TAGGED = "of class odd_tensors.Tagged, a subclass of Tensor, which"
_FREED = "a tensor whose memory has been freed"
_TRANSFORMED = "a tensor inside a transform of torch.func"
REFUSED: dict[str, Refused] = {
    "subclass": Refused(lambda x: x.as_subclass(Tagged), _TAGGED),
    "wrapper": Refused(lambda x: Wrapper(x.detach()), "of class odd_tensors.Wrapper, a subclass"),
    "masked": Refused(
        lambda x: masked_tensor(x.detach(), x.detach() > 0),
        "of class torch.masked.maskedtensor.core.MaskedTensor, a subclass",
    ),
    "nested": Refused(
        lambda x: torch.nested.nested_tensor([x[0].detach(), x[1, :2].detach()]),
        "a nested tensor of layout torch.strided, which",
    ),
    "jagged": Refused(
        lambda x: torch.nested.nested_tensor([x[0].detach()], layout=torch.jagged),
        "a NestedTensor, which",
    ),
    "fake": Refused(
        lambda x: FakeTensorMode().from_tensor(x.detach()),
        "of class torch._subclasses.fake_tensor.FakeTensor, a subclass",
    ),
    "functional": Refused(
        lambda x: torch._to_functional_tensor(x.detach()), "a functional tensor, as tracing"
    ),
    "functional subclass": Refused(
        lambda x: _functional(x.detach()),
        "of class torch._subclasses.functional_tensor.FunctionalTensor, a subclass",
    ),
    "vmap": Refused(lambda x: _leaked(torch.func.vmap, x.detach()), _TRANSFORMED),
    "grad": Refused(lambda x: _leaked(torch.func.grad, x.detach()), _TRANSFORMED),
    "coo": Refused(lambda x: x.to_sparse(), "of layout torch.sparse_coo on cpu, which"),
    "csr": Refused(lambda x: x.to_sparse_csr(), "of layout torch.sparse_csr on cpu, which"),
    "csc": Refused(lambda x: x.to_sparse_csc(), "of layout torch.sparse_csc on cpu, which"),
    "bsr": Refused(lambda x: x.to_sparse_bsr((1, 1)), "of layout torch.sparse_bsr on cpu, which"),
    "mkldnn": Refused(
        lambda x: x.detach().float().to_mkldnn(), "of layout torch._mkldnn on cpu, which"
    ),
    "quantised": Refused(
        lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8),
        "quantised, of torch.qint8, which",
    ),
    "meta": Refused(lambda x: x.to("meta"), "on meta and has no values, which"),
    "freed": Refused(lambda x: _freed(x.detach().clone()), _FREED),
    "partly freed": Refused(lambda x: _freed(x.detach().clone(), 8), _FREED),
    "freed, with an offset": Refused(lambda x: _freed(x.detach().clone()[1:]), _FREED),
    "freed behind its offset": Refused(lambda x: _freed(x.detach().clone()[1:], 64), _FREED),
    "freed and transposed": Refused(lambda x: _freed(x.detach().clone().t(), 88), _FREED),
    "uninitialised": Refused(
        lambda x: nn.UninitializedParameter(),
        "of class torch.nn.parameter.UninitializedParameter, a subclass",
    ),
}


def memory_of(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes, which any dtype can be compared by."""
    values = tensor.detach()
    if isinstance(values, AsyncCollectiveTensor):
        values = values.wait()
    values = values.resolve_conj().resolve_neg()
    return (values if values.is_contiguous() else values.contiguous()).view(-1).view(torch.uint8)


def total(value: Tensor) -> Tensor:
    """Weighs each place by another number, and takes real and imaginary parts apart."""
    if not value.requires_grad:
        return torch.zeros((), dtype=torch.float64)
    weights = torch.linspace(1, 2, value.numel(), dtype=torch.float64).view(value.shape)
    parts = [value.real, 3 * value.imag] if value.is_complex() else [value.double()]
    return torch.stack([(weights * part).sum() for part in parts]).sum()


class Sender(nn.Module):
    """Returns an odd tensor from call `begin` on, and before that a plain one.

    Most odd ones have its form, so that nothing but their kind tells them apart.
    """

    def __init__(self, make: Make, begin: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.make = make
        self.begin = begin
        self.call = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.call += 1
        y = self.scale * x
        made = self.make(y)
        if self.call < self.begin:
            made = torch.empty(3, 4, dtype=torch.float64)
        return y, made


class Receiver(nn.Module):
    """Keeps what came, and adds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[Tensor] = []

    def forward(self, y: Tensor, odd: Tensor) -> Tensor:
        self.came.append(odd)
        return y.sum() + total(odd)
