"""Cutting arguments into microbatches and joining them: what it gives, and what it refuses."""

import dataclasses
import re
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining import microbatch as torch_microbatch
from torch.utils import _pytree as pytree

from fuzzing import examples
from penstock.errors import MicrobatchError
from penstock.microbatches import (
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.microbatches.splitting import split_target

Pair = namedtuple("Pair", ["left", "right"])


class Box:
    """A container that was registered without names for its parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


pytree.register_pytree_node(Box, lambda box: (box.parts, None), lambda parts, _: Box(*parts))


def split_args(*args: Any, chunks: int = 2, spec: Any = None) -> list[tuple[Any, ...]]:
    return split_args_kwargs_into_chunks(args, None, chunks, args_chunk_spec=spec)[0]


def assert_same(expected: Any, actual: Any) -> None:
    """Both have the same structure, equal tensors of one dtype, and otherwise equal leaves."""
    expected_leaves, expected_tree = pytree.tree_flatten(expected)
    leaves, tree = pytree.tree_flatten(actual)
    assert expected_tree == tree
    for expected_leaf, leaf in zip(expected_leaves, leaves, strict=True):
        assert type(expected_leaf) is type(leaf)
        if isinstance(leaf, Tensor):
            assert expected_leaf.dtype == leaf.dtype
            assert torch.equal(expected_leaf, leaf)
        else:
            assert expected_leaf == leaf


def rejects(*texts: str) -> Any:
    """Expects a MicrobatchError whose message holds the texts in this order."""
    return pytest.raises(MicrobatchError, match=".*".join(map(re.escape, texts)))


# Specs


def test_specs_are_equal_by_value_and_can_be_hashed() -> None:
    assert TensorChunkSpec(1) == TensorChunkSpec(split_dim=1)
    assert TensorChunkSpec(1) != TensorChunkSpec(0)
    assert 2 == len({TensorChunkSpec(0), TensorChunkSpec(0), Replicate(), Replicate()})


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorChunkSpec(0).split_dim = 1  # type: ignore[misc]  # The point of the test.


def test_spec_is_written_as_in_torch() -> None:
    assert str(torch_microbatch.TensorChunkSpec(0)) == str(TensorChunkSpec(0))


def test_from_tuple_and_from_dict_map_nested_dims_and_keep_what_is_whole() -> None:
    zero, one = TensorChunkSpec(0), TensorChunkSpec(1)
    assert (zero, zero, one) == TensorChunkSpec.from_tuple((0, 0, 1))
    expected = (zero, ([one, None], {"a": Replicate()}))
    assert expected == TensorChunkSpec.from_tuple((0, ([1, None], {"a": Replicate()})))
    assert {"id": zero, "at": (one,)} == TensorChunkSpec.from_dict({"id": 0, "at": (1,)})


@pytest.mark.parametrize("dim", ["batch", 0.0, None])
def test_split_dim_that_is_no_int_is_rejected(dim: Any) -> None:
    with rejects(f"split_dim is {dim!r}; expected an int, or Replicate() for a whole value"):
        TensorChunkSpec(dim)


# Splitting


def test_tensor_is_cut_like_tensor_split_if_it_does_not_divide_evenly() -> None:
    x = torch.arange(14).reshape(7, 2)
    assert_same([(part,) for part in x.tensor_split(3)], split_args(x, chunks=3))


def test_value_without_rows_is_given_whole_to_every_microbatch() -> None:
    scalar, model = torch.tensor(3.0), object()
    for args in split_args(torch.zeros(4), scalar, model, None, "text", 7):
        assert scalar is args[1]
        assert model is args[2]
        assert (None, "text", 7) == args[3:]


def test_nested_args_and_kwargs_are_cut_leaf_by_leaf() -> None:
    x = torch.arange(4)
    value = [(x, None), {"a": x, "b": OrderedDict(c=x)}, Pair(x, 1)]
    first = [(x[:2], None), {"a": x[:2], "b": OrderedDict(c=x[:2])}, Pair(x[:2], 1)]
    args, kwargs = split_args_kwargs_into_chunks((value,), {"value": value}, 2)
    assert_same((first,), args[0])
    assert_same({"value": first}, kwargs[0])


def test_registered_container_is_cut_and_made_anew() -> None:
    boxes = [box for (box,) in split_args(Box(torch.arange(4), "whole"))]
    assert_same([(torch.arange(2), "whole"), (torch.arange(2, 4), "whole")], [*map(_open, boxes)])


def _open(box: Box) -> tuple[Any, ...]:
    return box.parts


def test_microbatches_do_not_share_containers() -> None:
    first, second = split_args([torch.zeros(2)])
    assert first[0] is not second[0]


def test_no_kwargs_and_no_args_give_an_empty_one_per_microbatch() -> None:
    assert ([(), (), ()], [{}, {}, {}]) == split_args_kwargs_into_chunks((), None, 3)


def test_spec_is_ignored_on_a_rank_that_is_given_no_arguments() -> None:
    specs = {"args_chunk_spec": (TensorChunkSpec(0),), "kwargs_chunk_spec": {"a": Replicate()}}
    assert ([(), ()], [{}, {}]) == split_args_kwargs_into_chunks((), {}, 2, **specs)


def test_args_may_be_a_list() -> None:
    args, _ = split_args_kwargs_into_chunks([torch.arange(2)], None, 2, [TensorChunkSpec(0)])  # type: ignore[arg-type]  # torch takes lists too.
    assert_same([(torch.tensor([0]),), (torch.tensor([1]),)], args)


@pytest.mark.parametrize("dim", [1, -1])
def test_spec_chooses_the_dim(dim: int) -> None:
    x = torch.arange(8).reshape(2, 4)
    assert_same([(x[:, :2],), (x[:, 2:],)], split_args(x, spec=(TensorChunkSpec(dim),)))


@pytest.mark.parametrize("whole", [None, Replicate()])
def test_whole_spec_gives_the_tensor_itself(whole: Any) -> None:
    table = torch.zeros(1, 3)
    kwargs = {"x": torch.zeros(2), "table": table}
    specs = {"table": whole, "x": TensorChunkSpec(0)}
    _, parts = split_args_kwargs_into_chunks((), kwargs, 2, kwargs_chunk_spec=specs)
    assert all(table is part["table"] and 1 == len(part["x"]) for part in parts)
    assert [["x", "table"]] * 2 == [list(part) for part in parts]


def test_one_spec_stands_for_all_that_is_nested_there() -> None:
    x = torch.zeros(4, 6)
    value = {"cache": [(x, x), (x, None)], "empty": [], "flag": True}
    (first,), _ = split_args(value, spec=(TensorChunkSpec(1),))
    half = torch.zeros(4, 3)
    assert_same({"cache": [(half, half), (half, None)], "empty": [], "flag": True}, first)
    assert_same([(value,)] * 2, split_args(value, spec=(Replicate(),)))
    assert_same([(value,)] * 2, split_args(value, spec=Replicate()))


def test_spec_mirrors_nested_args_with_lists_for_tuples() -> None:
    x, y = torch.zeros(2, 2), torch.zeros(1)
    spec = [[TensorChunkSpec(1), [Replicate()]]]
    assert_same([((x[:, :1], (y,)),)] * 2, split_args((x, (y,)), spec=spec))


def test_spec_mirrors_a_container_whose_parts_have_no_names() -> None:
    x = torch.zeros(2, 4)
    ((box,), _) = split_args(Box(x, x), spec=(Box(TensorChunkSpec(1), None),))
    assert [(2, 2), (2, 4)] == [part.shape for part in box.parts]


def test_target_is_cut_like_an_argument() -> None:
    target = {"label": torch.arange(3), "weight": torch.tensor(0.5), "kind": None}
    expected = [{**target, "label": torch.tensor([0, 1])}, {**target, "label": torch.tensor([2])}]
    assert_same(expected, split_target(target, 2))
    assert [None, None] == split_target(None, 2)


def test_cutting_does_not_copy() -> None:
    x = torch.rand(3, 2)
    for dim in (0, 1):
        parts = [part for (part,) in split_args(x, spec=(TensorChunkSpec(dim),))]
        assert all(part.untyped_storage().data_ptr() == x.data_ptr() for part in parts)
        assert all(part._base is x for part in parts)


def test_gradients_flow_through_the_views_to_the_whole_tensor() -> None:
    x = torch.ones(5, requires_grad=True)
    for i, (part,) in enumerate(split_args(x, chunks=3)):
        (part * i).sum().backward()
    assert_same(torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0]), x.grad)


# Errors of splitting


@pytest.mark.parametrize("chunks", [0, -1, 2.0, "2"])
def test_number_of_microbatches_below_one_is_rejected(chunks: Any) -> None:
    expected = "expected the number of microbatches, an int of 1 or more"
    with rejects(f"chunks is {chunks!r}; {expected}"):
        split_args(torch.zeros(4), chunks=chunks)
    with rejects(f"num_microbatches is {chunks!r}; {expected}"):
        split_target(torch.zeros(4), chunks)


def test_args_that_are_no_tuple_are_rejected() -> None:
    with rejects("args is a tensor of shape (4, 2); expected a tuple;", "write (argument,)"):
        split_args_kwargs_into_chunks(torch.zeros(4, 2), None, 2)  # type: ignore[arg-type]  # The point of the test.


def test_kwargs_that_are_no_dict_are_rejected() -> None:
    with rejects("kwargs is a list with [0]; expected a dict, or None"):
        split_args_kwargs_into_chunks((), [1], 2)  # type: ignore[arg-type]  # The point of the test.


def test_tensor_with_fewer_rows_than_microbatches_is_rejected_by_its_name() -> None:
    x, small = torch.zeros(8, 4), torch.zeros(3, 4)
    fault = "has size 3 along dim 0 (shape (3, 4)), too small for 8 microbatches. Expected 8"
    advice = "Use a larger batch or fewer microbatches"
    with rejects(f"args[1]['mask'] {fault}", f"{advice}, or", "Replicate() in args_chunk_spec."):
        split_args(x, {"mask": small}, chunks=8)
    with rejects(f"kwargs['pair'].right {fault}", "Replicate() in kwargs_chunk_spec."):
        split_args_kwargs_into_chunks((x,), {"pair": Pair(x, small)}, 8)
    with rejects(f"args[0][1] {fault}"):
        split_args(Box(x, small), chunks=8)
    with rejects(f"target {fault}", f"{advice}."):
        split_target(small, 8)


def test_tensor_too_small_along_the_dim_of_its_spec_is_rejected() -> None:
    with rejects("args[0] has size 3 along dim -1 (shape (8, 3)), too small for 4 microbatches"):
        split_args(torch.zeros(8, 3), chunks=4, spec=(TensorChunkSpec(-1),))


@pytest.mark.parametrize(("shape", "dim"), [((4, 2), 2), ((4, 2), -3), ((), 0)])
def test_spec_with_a_dim_that_the_tensor_lacks_is_rejected(shape: tuple[int], dim: int) -> None:
    fault = f"args[0]['x'] is a tensor of shape {shape}; expected a tensor with the dim of "
    with rejects(fault, f"TensorChunkSpec({dim}), or Replicate() for it in args_chunk_spec"):
        split_args({"x": torch.zeros(shape)}, spec=(TensorChunkSpec(dim),))


MISFITS = [
    ((TensorChunkSpec(0),), "args, which is a tuple with [0], [1]['m']: there it holds a tuple"),
    ((None, None, None), "args, which is a tuple with [0], [1]['m']: there it holds a tuple"),
    ((None, {"n": None}), "args[1], which is a dict with ['m']: there it holds a dict with ['n']"),
    ((None, {}), "args[1], which is a dict with ['m']: there it holds a dict with nothing in it"),
    (((None,), None), "args[0], which is a tensor of shape (4,): there it holds a tuple with [0]"),
    ((0, None), "args[0], which is a tensor of shape (4,): there it holds 0."),
    ((None, 0), "args[1], which is a dict with ['m']: there it holds 0."),
    ((None, {"m": "whole"}), "args[1]['m'], which is 3: there it holds 'whole'."),
    ((Replicate, None), "args[0], which is a tensor of shape (4,): there it holds <class"),
]


@pytest.mark.parametrize(("spec", "fault"), MISFITS)
def test_spec_that_does_not_mirror_the_arguments_is_rejected(spec: Any, fault: str) -> None:
    advice = "Expected TensorChunkSpec(dim) to cut it, Replicate() or None to pass it whole"
    with rejects(f"args_chunk_spec does not mirror {fault}", advice):
        split_args(torch.zeros(4), {"m": 3}, spec=spec)


def test_kwargs_spec_that_lacks_a_key_is_rejected_by_its_own_name() -> None:
    kwargs = {"a": torch.zeros(2), "b": 1}
    with rejects("kwargs_chunk_spec does not mirror kwargs, which is a dict with ['a'], ['b']"):
        split_args_kwargs_into_chunks((), kwargs, 2, kwargs_chunk_spec={"a": None})


# Merging


def test_values_of_microbatches_are_joined_along_the_first_dim() -> None:
    chunks = [{"y": [torch.zeros(n, 2)], "n": n} for n in (3, 1)]
    assert_same({"y": [torch.zeros(4, 2)], "n": 3}, merge_chunks(chunks, None))


def test_scalars_are_stacked() -> None:
    assert_same(torch.tensor([1.0, 2.0]), merge_chunks([torch.tensor(1.0), torch.tensor(2.0)]))


def test_spec_chooses_the_dim_of_a_merge_and_what_is_kept_from_the_first() -> None:
    chunks = [(torch.full((2, n), n), torch.tensor(n), [torch.full((n,), n)]) for n in (1, 2)]
    merged = merge_chunks(chunks, (TensorChunkSpec(-1), None, Replicate()))
    expected = (torch.tensor([[1, 2, 2], [1, 2, 2]]), torch.tensor(1), [torch.tensor([1])])
    assert_same(expected, merged)


def test_merge_finds_the_keys_of_dicts_in_any_order() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert_same(
        {"a": a.expand(2), "b": b.expand(2)}, merge_chunks([dict(a=a, b=b), dict(b=b, a=a)])
    )


def test_merge_gives_a_registered_container() -> None:
    merged = merge_chunks([Box(torch.zeros(1), "a"), Box(torch.zeros(2), "b")])
    assert_same((torch.zeros(3), "a"), _open(merged))


def test_gradients_flow_through_a_merge() -> None:
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    (merge_chunks(parts) * torch.arange(3)).sum().backward()
    assert_same([torch.tensor([0.0, 1.0]), torch.tensor([2.0])], [part.grad for part in parts])


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([], "chunks is a list with nothing in it"),
        (torch.zeros(4, 2), "chunks is a tensor of shape (4, 2)"),
        (None, "chunks is None"),
    ],
)
def test_merge_of_no_microbatches_is_rejected(chunks: Any, fault: str) -> None:
    with rejects(f"{fault}; expected a list with the value of at least one microbatch"):
        merge_chunks(chunks)


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        ({"a": X}, "is a dict with ['a']"),
        ({"a": X, "c": (X, X)}, "is a dict with ['a'], ['c'][0], ['c'][1]"),
        ({"a": X, "b": (X,)}, "is a dict with ['a'], ['b'][0]"),
        ({"a": X, "b": [X, X]}, "is a dict with ['a'], ['b'][0], ['b'][1]"),
        ({"a": X, "b": None}, "is a dict with ['a'], ['b']"),
        ({"a": (X,), "b": (X, X)}, "is a dict with ['a'][0], ['b'][0], ['b'][1]"),
        (X, "is a tensor of shape (2, 3)"),
        (None, "is None"),
    ],
)
def test_merge_of_different_structures_is_rejected(second: Any, fault: str) -> None:
    first = {"a": X, "b": (X, X)}
    other = "chunks[0] is a dict with ['a'], ['b'][0], ['b'][1]. Expected the same structure"
    for spec in (None, Replicate()):
        with rejects(f"microbatch 1 is not nested like microbatch 0: chunks[1] {fault}, {other}"):
            merge_chunks([first, second], spec)


@pytest.mark.parametrize("shape", [(2, 4), (2,), (2, 3, 1), ()])
def test_merge_of_shapes_that_do_not_fit_is_rejected(shape: tuple[int, ...]) -> None:
    fault = "microbatch 2 cannot be joined with microbatch 0: "
    shapes = (
        f"chunks[2]['y'] is a tensor of shape {shape}, chunks[0]['y'] is a tensor of shape (2, 3)"
    )
    with rejects(fault, shapes, "Expected tensors whose shapes differ along dim 0 only"):
        merge_chunks([{"y": X}, {"y": X}, {"y": torch.zeros(shape)}])


def test_merge_of_a_scalar_with_a_tensor_that_has_rows_is_rejected() -> None:
    for chunks in ([torch.zeros(()), torch.zeros(2)], [torch.zeros(2), torch.zeros(())]):
        with rejects("microbatch 1 cannot be joined with microbatch 0"):
            merge_chunks(chunks)


def test_merge_of_a_tensor_with_what_is_none_is_rejected() -> None:
    with rejects("chunks[1][0] is None, chunks[0][0] is a tensor of shape (2, 3)"):
        merge_chunks([(X,), (None,)])
    with rejects("chunks[1][0] is a tensor of shape (2, 3), chunks[0][0] is 'text'"):
        merge_chunks([("text",), (X,)])


def test_merge_names_the_dim_of_its_spec_if_shapes_do_not_fit() -> None:
    with rejects("whose shapes differ along dim 1 only"):
        merge_chunks([X, torch.zeros(1, 3)], TensorChunkSpec(1))


def test_merge_spec_that_does_not_fit_is_rejected() -> None:
    with rejects("chunk_spec does not mirror chunks[0], which is a tuple with [0], [1]"):
        merge_chunks([(X, X)], (TensorChunkSpec(0),))
    with rejects("chunks[0][0] is a tensor of shape (); expected a tensor with the dim of"):
        merge_chunks([(torch.tensor(1.0),)], TensorChunkSpec(0))


# Properties


def leaves(num_microbatches: int) -> st.SearchStrategy[Any]:
    """Tensors that can be cut along any dim, and other things."""
    size = st.integers(num_microbatches, num_microbatches + 5)
    shapes = st.lists(size, min_size=1, max_size=3)
    tensors = shapes.map(lambda shape: torch.rand(shape))
    return tensors | st.none() | st.integers() | st.text(max_size=3)


def nested(num_microbatches: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves(num_microbatches),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


@st.composite
def values_and_counts(draw: st.DrawFn) -> tuple[Any, int]:
    num_microbatches = draw(st.integers(1, 5))
    return draw(nested(num_microbatches)), num_microbatches


@pytest.mark.fuzz
@given(case=values_and_counts())
@examples(60, long=1000)
def test_merge_is_the_inverse_of_a_split(case: tuple[Any, int]) -> None:
    value, num_microbatches = case
    parts = split_target(value, num_microbatches)
    assert num_microbatches == len(parts)
    assert_same(value, merge_chunks(parts, None))


@pytest.mark.fuzz
@given(case=values_and_counts(), data=st.data())
@examples(60, long=1000)
def test_merge_with_a_spec_is_the_inverse_of_a_split_with_it(
    case: tuple[Any, int], data: st.DataObject
) -> None:
    value, num_microbatches = case

    def draw_spec(leaf: Any) -> Any:
        dims = leaf.dim() if isinstance(leaf, Tensor) else 1
        cut = st.integers(-dims, dims - 1).map(TensorChunkSpec)
        return data.draw(cut | st.sampled_from([None, Replicate()]))

    spec = pytree.tree_map(draw_spec, (value,))
    args, _ = split_args_kwargs_into_chunks((value,), None, num_microbatches, spec)
    assert_same((value,), merge_chunks(args, spec))


@pytest.mark.fuzz
@given(case=values_and_counts(), rest=nested(5))
@examples(60, long=1000)
def test_split_equals_that_of_torch_on_what_both_accept(case: tuple[Any, int], rest: Any) -> None:
    value, num_microbatches = case
    # torch fails where there is nothing but empty containers, so there is always a number.
    batch = (value, rest, 0), {"value": value, "rest": rest, "number": 0}
    expected = torch_microbatch.split_args_kwargs_into_chunks(*batch, num_microbatches)
    assert_same(expected, split_args_kwargs_into_chunks(*batch, num_microbatches))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-1, 0)])
def test_split_and_merge_with_specs_equal_those_of_torch(dims: tuple[int, int]) -> None:
    args = torch.rand(5, 4), {"y": torch.rand(7, 3)}
    spec = dims[0], {"y": dims[1]}
    ours = TensorChunkSpec.from_tuple(spec)
    theirs = pytree.tree_map(torch_microbatch.TensorChunkSpec, spec)
    expected, _ = torch_microbatch.split_args_kwargs_into_chunks(args, {}, 3, theirs)
    actual, _ = split_args_kwargs_into_chunks(args, {}, 3, ours)
    assert_same(expected, actual)
    assert_same(torch_microbatch.merge_chunks(expected, theirs), merge_chunks(actual, ours))


def test_torch_makes_fewer_microbatches_than_asked_for_where_this_is_an_error_here() -> None:
    args = (torch.zeros(3),)
    assert 3 == len(torch_microbatch.split_args_kwargs_into_chunks(args, None, 4)[0])
    with rejects("args[0] has size 3 along dim 0"):
        split_args_kwargs_into_chunks(args, None, 4)
