"""Arguments that carry a batch and are not tensors: cut rightly, or refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import microbatch as torch_microbatch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.utils.rnn import pack_sequence

from limits import PROCESS_S
from odd_tensors import Tagged
from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.errors import MicrobatchError
from penstock.microbatches import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.microbatches.splitting import split_target

BATCH, HEADS, LENGTH = 5, 2, 256
LIMITS = torch.tensor([256, 30, 131, 7, 200])


def _within_limit(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Another mask for each row of the batch, and for each head."""
    return (k < LIMITS[b]) & (q + h >= k)


def _mask(batch: int = BATCH, **kwargs: Any) -> BlockMask:
    return create_block_mask(_within_limit, batch, HEADS, LENGTH, LENGTH, device="cpu", **kwargs)


def _queries() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, LENGTH, 8)


def _attend(x: Tensor, mask: BlockMask) -> Tensor:
    with torch.no_grad():
        out: Tensor = flex_attention(x, x, x, block_mask=mask)
    return out


def _cut(*args: Any, chunks: int = 2, spec: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    return split_args_kwargs_into_chunks(args, kwargs, chunks, spec)


pytestmark = pytest.mark.filterwarnings("ignore")  # flex_attention warns that it is not compiled.


@pytest.mark.parametrize(
    ("chunks", "spec"),
    [(1, None), (2, (TensorChunkSpec(0), TensorChunkSpec(0))), (3, None), (5, None)],
)
def test_a_mask_is_cut_along_its_batch(chunks: int, spec: Any) -> None:
    """It went whole to every microbatch, which then used the rows of the first one."""
    x, mask = _queries(), _mask()
    pieces, _ = _cut(x, mask, chunks=chunks, spec=spec)
    found = torch.cat([_attend(*piece) for piece in pieces])
    assert torch.equal(_attend(x, mask), found)


@pytest.mark.parametrize("chunks", [2, 5])
def test_a_mask_is_cut_as_torch_cuts_it(chunks: int) -> None:
    mask = _mask()
    ours = [piece for (piece,) in _cut(mask, chunks=chunks)[0]]
    theirs = torch_microbatch._split_block_mask(mask, chunks)
    for expected, found in zip(theirs, ours, strict=True):
        assert vars(expected).keys() == vars(found).keys()
        for name, value in vars(expected).items():
            other = getattr(found, name)
            if isinstance(value, Tensor):
                assert torch.equal(value, other), name
            elif name != "mask_mod":
                assert value == other, name
        rows = expected.kv_num_blocks.shape[0]
        masks = [
            create_mask(piece.mask_mod, rows, HEADS, 8, 8, device="cpu")
            for piece in (expected, found)
        ]
        assert torch.equal(*masks)


def test_a_mask_is_cut_in_nested_kwargs_and_in_targets() -> None:
    x, mask = _queries(), _mask()
    expected = _attend(x, mask)
    _, kwargs = _cut(options={"masks": [mask], "x": x})
    found = [_attend(row["options"]["x"], row["options"]["masks"][0]) for row in kwargs]
    assert torch.equal(expected, torch.cat(found))
    targets = split_target((x, mask), 2)
    assert torch.equal(expected, torch.cat([_attend(*target) for target in targets]))


@pytest.mark.parametrize("whole", [Replicate(), None])
def test_a_mask_goes_whole_where_the_spec_says_so(whole: Any) -> None:
    mask = _mask()
    pieces, _ = _cut(_queries(), mask, spec=(TensorChunkSpec(0), whole))
    assert all(piece[1] is mask for piece in pieces)


def test_a_mask_for_all_rows_and_callables_go_whole() -> None:
    mask, score_mod = _mask(batch=1), lambda score, b, h, q, k: score
    pieces, _ = _cut(_queries(), mask, score_mod)
    assert all(piece[1] is mask and piece[2] is score_mod for piece in pieces)


@pytest.mark.parametrize(
    ("args", "chunks", "spec", "message"),
    [
        (
            (_mask(2),),
            3,
            None,
            "args[0] is a BlockMask with a batch of 2, too small for 3 microbatches. Expected 1, "
            "for a mask that all rows share, or 3 or more. Use a larger batch or fewer "
            "microbatches, or pass it whole with Replicate() in args_chunk_spec.",
        ),
        (
            (torch.zeros(4), _mask(2)),
            2,
            None,
            "args[1] is a BlockMask with a batch of 2, but args[0] is cut along a size of 4. "
            "Expected the same batch for both, or a mask with a batch of 1. Make the mask "
            "for the batch, or pass it whole with Replicate() in args_chunk_spec.",
        ),
        (
            (_mask(2),),
            2,
            (TensorChunkSpec(1),),
            "args[0] is a BlockMask, but its spec is TensorChunkSpec(1). Expected "
            "TensorChunkSpec(0), as a mask can be cut along its batch only, or pass it whole with "
            "Replicate() in args_chunk_spec.",
        ),
    ],
    ids=["small batch", "another batch", "another dim"],
)
def test_a_mask_that_does_not_fit_is_refused(
    args: Any, chunks: int, spec: Any, message: str
) -> None:
    with pytest.raises(MicrobatchError) as caught:
        _cut(*args, chunks=chunks, spec=spec)
    assert message == str(caught.value)


def test_a_mask_of_kwargs_is_compared_with_the_batch_of_args() -> None:
    with pytest.raises(MicrobatchError, match=r"kwargs\['mask'\] .* of 2, but args\[0\] .* of 4"):
        _cut(torch.zeros(4), mask=_mask(2))


@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("dq_write_order", BATCH, "it has a dq_write_order"),
        ("q_indices", 1, "its q_indices has 1 rows, but its batch is 5"),
    ],
)
def test_a_mask_that_cannot_be_cut_is_refused(name: str, rows: int, reason: str) -> None:
    mask = _mask()
    setattr(mask, name, torch.zeros(rows, HEADS, 2, 2))
    message = (
        f"args[0] is a BlockMask that cannot be cut: {reason}. Expected what create_block_mask "
        "makes. Make it without that, or cut it for step_microbatches, or pass it whole with "
        "Replicate() in args_chunk_spec."
    )
    with pytest.raises(MicrobatchError) as caught:
        _cut(mask)
    assert message == str(caught.value)


def test_a_pipeline_gives_each_microbatch_its_part_of_a_mask() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            return _attend(x, mask)

    x, mask = _queries(), _mask()

    def main(group: LocalGroup) -> Any:
        stage = PipelineStage(Attention(), group.rank, 2, "cpu", group=group)
        pipeline = Pipeline(stage, "GPipe", num_microbatches=3)
        args = (x,) if group.rank == 0 else ()
        return pipeline.eval(*args, mask=mask)

    assert torch.equal(_attend(_attend(x, mask), mask), local_ranks(2, main)[1])


def test_cutting_does_not_load_flex_attention() -> None:
    code = (
        "import sys, torch, penstock\n"
        "penstock.split_args_kwargs_into_chunks((torch.ones(4), object()), None, 2)\n"
        "assert 'torch.nn.attention.flex_attention' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PROCESS_S)


# Objects


@dataclass
class Data:
    rows: Any
    name: str = ""


@dataclass(slots=True)
class Slots:
    rows: Any


class PlainSlots:
    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Rows(dict[str, Any]):
    """A dict that pytree does not take apart."""


class Cache:
    """As those of transformers are: layers that hold keys and values."""

    def __init__(self, rows: Any) -> None:
        self.layers = [SimpleNamespace(keys=rows, values=rows)]
        self.itself = self


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "dataclass": Data,
    "slots": Slots,
    "slots of a plain class": PlainSlots,
    "dict": lambda rows: Rows(rows=rows),
    "cache": Cache,
    "distribution": lambda rows: torch.distributions.Normal(rows, torch.ones(()), False),
    "nested deeper": lambda rows: SimpleNamespace(data={"a": [Data((rows,))]}),
}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_an_object_that_holds_a_batch_is_refused(name: str) -> None:
    held = HOLDERS[name](torch.zeros(4, 2))
    message = (
        f"is a {type(held).__name__} that holds tensors with a batch, which cannot be cut into "
        "microbatches. Expected tensors, or nested tuples, lists and dicts of them. Register its "
        "class with torch.utils._pytree.register_pytree_node, or cut it for step_microbatches"
    )
    with pytest.raises(MicrobatchError) as caught:
        _cut(torch.zeros(4), held)
    expected = f"args[1] {message}, or pass it whole with Replicate() in args_chunk_spec."
    assert expected == str(caught.value)
    with pytest.raises(MicrobatchError) as caught:
        split_target([held], 2)
    assert f"target[0] {message}." == str(caught.value)
    spec = (TensorChunkSpec(0), Replicate())
    assert all(args[1] is held for args in _cut(torch.zeros(4), held, spec=spec)[0])
    assert all(args[1] is held for args in _cut(torch.zeros(4), held, chunks=1)[0])


@pytest.mark.parametrize(
    "value",
    [
        Data("text"),
        Data(torch.tensor(3.0)),
        Data(torch.zeros(3, 7)),
        Data(nn.Parameter(torch.zeros(4))),
        Data(nn.Linear(4, 4)),
        nn.BatchNorm1d(4),
        torch.optim.SGD([nn.Parameter(torch.zeros(4))]),
        lambda: torch.zeros(4),
        object(),
        Data,
        torch.Generator(),
        Cache(None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_harmless_value_goes_whole(value: Any) -> None:
    assert all(args[1] is value for args in _cut(torch.zeros(4), value)[0])


def test_without_a_batch_to_compare_with_rows_are_taken_for_one() -> None:
    with pytest.raises(MicrobatchError, match=r"kwargs\['data'\] is a Data that holds tensors"):
        _cut(data=Data(torch.zeros(4, 2)))
    data = Data(torch.zeros(1, 2))
    assert all(row["data"] is data for row in _cut(data=data)[1])


def test_a_packed_sequence_is_refused() -> None:
    """It is a named tuple: its parts were cut, as if its first rows were those of a row."""
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(MicrobatchError, match=r"args\[1\] is a PackedSequence that holds tensors"):
        _cut(torch.zeros(2), packed)
    pieces, _ = _cut(torch.zeros(2), packed, spec=(TensorChunkSpec(0), None))
    assert all(piece[1] is packed for piece in pieces)
    message = (
        "microbatches cannot be joined: chunks[0][0] is a PackedSequence, whose rows are "
        "interleaved. Expected tensors. Let the model return a padded tensor, or give a "
        "chunk_spec with None for it, which keeps that of microbatch 0."
    )
    with pytest.raises(MicrobatchError) as caught:
        merge_chunks([(packed,), (packed,)])
    assert message == str(caught.value)
    assert merge_chunks([(packed,), (packed,)], (None,)) == (packed,)


# Tensors of other kinds


class Plain(Tensor):
    """A subclass whose pieces are plain tensors, without what made it one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


ROWS = torch.arange(8.0).view(4, 2)
RAGGED = [ROWS[0], ROWS[1, :1]]


@pytest.mark.parametrize(
    ("make", "kind", "layout"),
    [
        (lambda: ROWS.to_sparse(), "Tensor", "torch.sparse_coo"),
        (lambda: ROWS.to_sparse_csr(), "Tensor", "torch.sparse_csr"),
        (lambda: ROWS.to_mkldnn(), "Tensor", "torch._mkldnn"),
        (lambda: torch.nested.nested_tensor(RAGGED), "Tensor", "torch.strided"),
        (
            lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
            "NestedTensor",
            "torch.jagged",
        ),
        (lambda: ROWS.as_subclass(Plain), "Plain", "torch.strided"),
    ],
    ids=["coo", "csr", "mkldnn", "nested", "jagged", "subclass"],
)
def test_a_tensor_that_cannot_be_cut_is_refused(
    make: Callable[[], Tensor], kind: str, layout: str
) -> None:
    tensor = make()
    message = (
        f"args[0] is a {kind} of layout {layout}, which cannot be cut along dim 0. Expected a "
        "dense tensor. Convert it, or cut it for step_microbatches, or pass it whole with "
        "Replicate() in args_chunk_spec."
    )
    with pytest.raises(MicrobatchError) as caught:
        _cut(tensor)
    assert message == str(caught.value)
    assert all(args[0] is tensor for args in _cut(tensor, spec=(Replicate(),))[0])


@pytest.mark.parametrize("kind", [Tagged, nn.Parameter])
def test_a_subclass_that_can_be_cut_is(kind: type[Tensor]) -> None:
    tensor = ROWS.as_subclass(Tagged) if kind is Tagged else nn.Parameter(ROWS)
    pieces = [piece for (piece,) in _cut(tensor)[0]]
    assert torch.equal(ROWS, torch.cat([piece.detach().as_subclass(Tensor) for piece in pieces]))
    if kind is Tagged:
        assert {Tagged} == set(map(type, pieces))
