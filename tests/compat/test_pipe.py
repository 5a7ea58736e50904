"""A traced pipe of compat is a module, and gives what torch's Pipe gives."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from penstock import compat
from penstock.compat import Pipe
from penstock.errors import PartitionError, StageError, StepError, TraceError
from pipe_models import CUT_AT, KINDS, make_inputs, make_net


def make_theirs(model: nn.Module, *example: Any, **options: Any) -> Any:
    from torch.distributed import pipelining

    spec = {CUT_AT: pipelining.SplitPoint.BEGINNING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's tracer uses names that it deprecates.
        return pipelining.pipeline(model, *example, split_spec=spec, **options)


def make_pipe(model: nn.Module, *example: Any) -> Pipe:
    spec = {CUT_AT: compat.SplitPoint.BEGINNING}
    return compat.pipeline(model, *example, split_spec=spec)


def assert_same(expected: Any, actual: Any) -> None:
    first, structure = pytree.tree_flatten(expected)
    second, other = pytree.tree_flatten(actual)
    assert structure == other
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


@pytest.mark.parametrize("kind", KINDS)
def test_pipe_and_its_last_stage_give_what_torch_gives(kind: str) -> None:
    inputs = make_inputs()
    theirs, ours = make_theirs(make_net(kind), inputs), make_pipe(make_net(kind), inputs)
    with torch.no_grad():
        assert_same(theirs(*inputs), ours(*inputs))
        between = theirs.get_stage_module(0)(*inputs)
        given = ours.get_stage_module(0)(*inputs)
        last = ours.get_stage_module(1)(*(given if isinstance(given, tuple) else (given,)))
        assert_same(theirs.get_stage_module(1)(between), last)


def test_names_are_those_of_torch() -> None:
    theirs, ours = make_theirs(make_net(), make_inputs()), make_pipe(make_net(), make_inputs())
    assert set(theirs.state_dict()) == set(ours.state_dict())
    assert theirs.replicated_params == ours.replicated_params
    children = [name for name, _ in theirs.split_gm.named_children()]
    assert children == [name for name, _ in ours.split_gm.named_children()]
    assert children == [compat._IR.get_submod_name(stage) for stage in (0, 1)]
    for theirs_node, node in zip(
        theirs.split_gm.graph.nodes, ours.split_gm.graph.nodes, strict=True
    ):
        assert (theirs_node.op, theirs_node.target) == (node.op, node.target) or node.op == "output"


def test_state_dict_of_torch_can_be_loaded() -> None:
    inputs = make_inputs()
    theirs, ours = make_theirs(make_net(), inputs), make_pipe(make_net(), inputs)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(theirs.state_dict())
    assert_same(theirs(*inputs), ours(*inputs))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict({**theirs.state_dict(), "split_gm.more": torch.ones(1)})


def test_parameters_are_those_of_the_model_but_for_copies_of_tied_ones() -> None:
    model = make_net()
    pipe = make_pipe(model, make_inputs())
    first, last = (pipe.get_stage_module(stage) for stage in (0, 1))
    assert first.get_parameter("embed.weight") is model.embed.weight
    assert last.get_parameter("layers.2.bias") is model.layers[2].bias
    assert last.get_parameter("head.weight") is not model.head.weight
    assert torch.equal(last.get_parameter("head.weight"), model.head.weight)
    assert not any(p.requires_grad for p in pipe.requires_grad_(False).parameters())
    assert not model.embed.weight.requires_grad


CALLS = {
    "as traced": lambda x, scale, shift: ((x, scale), {"shift": shift}),
    "by position": lambda x, scale, shift: ((x, scale, shift), {}),
    "by keyword": lambda x, scale, shift: ((), {"shift": shift, "x": x, "scale": scale}),
    "mixed": lambda x, scale, shift: ((x,), {"scale": scale, "shift": shift}),
}


@pytest.mark.parametrize("way", CALLS)
def test_arguments_are_bound_as_torch_binds_them(way: str) -> None:
    inputs, shift = make_inputs(), torch.ones(7)
    theirs = make_theirs(make_net(), inputs, {"shift": shift})
    ours = make_pipe(make_net(), inputs, {"shift": shift})
    args, kwargs = CALLS[way](*inputs, shift)
    assert_same(theirs(*args, **kwargs), ours(*args, **kwargs))
    # The first stage takes them likewise, and hands on what later ones use.
    assert_same(
        ours.get_stage_module(0)(*inputs, shift=shift), ours.get_stage_module(0)(*args, **kwargs)
    )


@pytest.mark.parametrize(
    ("num_args", "names"),
    [(1, ["shift"]), (2, []), (2, ["x", "shift"]), (2, ["shift", "more"]), (3, ["shift"])],
)
def test_arguments_that_do_not_fit_are_refused(num_args: int, names: list[str]) -> None:
    inputs, shift = make_inputs(), torch.ones(7)
    pipe = make_pipe(make_net(), inputs, {"shift": shift})
    args = (*inputs, shift)[:num_args]
    with pytest.raises(StageError, match="was traced with 2 positional arguments, shift="):
        pipe(*args, **dict.fromkeys(names, shift))


class Skipping(nn.Module):
    """Its keyword argument is not the next one after the positional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, unused: Tensor | None = None, *, shift: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + shift


def test_position_stands_for_the_next_traced_argument_in_a_pipe_but_not_in_a_stage() -> None:
    x, shift = torch.ones(2, 4), torch.ones(4)
    model = Skipping()
    pipe = make_pipe(model, (x,), {"shift": shift})
    assert torch.equal(model(x, shift=shift), pipe(x, shift)[0])
    with pytest.raises(StageError, match="called with 2 positional arguments"):
        pipe.get_stage_module(0)(x, shift)


def test_other_size_of_batch_is_taken_where_the_graph_is_the_same() -> None:
    model = make_net()
    pipe = make_pipe(model, make_inputs())
    for size in (3, 5, 3):
        assert_same((model(*make_inputs(size)),), pipe(*make_inputs(size)))


class OfSize(nn.Module):
    """The graph has the size of the batch in it, which no operation notices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum(0) / x.shape[0]


class OfSizeInTensor(OfSize):
    """The graph has the size in a constant tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum(0) / torch.tensor([float(x.shape[0]), 1.0, 1.0, 1.0])


@pytest.mark.parametrize("kind", [OfSize, OfSizeInTensor])
def test_other_size_of_batch_is_refused_where_the_graph_has_the_size_in_it(
    kind: type[nn.Module],
) -> None:
    model = kind()
    expected = model(torch.ones(2, 4))
    pipe = make_pipe(model, (torch.ones(2, 4),))
    with pytest.raises(
        StageError, match=r"input x: .* expected \(2, 4\), got \(3, 4\), and the model does"
    ):
        pipe(torch.ones(3, 4))
    assert torch.equal(expected, pipe(torch.ones(2, 4))[0])


def test_dtype_can_be_changed_where_the_graph_is_the_same() -> None:
    model = make_net()
    expected = copy.deepcopy(model).double()
    pipe = make_pipe(model, make_inputs()).to(torch.float64)
    x, scale = make_inputs()
    assert torch.equal(expected(x, scale.double()), pipe(x, scale.double())[0])
    assert all(p.dtype is torch.float64 for p in pipe.parameters())


class OfDtype(OfSize):
    """The graph has the smallest number of a dtype in it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.clamp(min=torch.finfo(x.dtype).eps)


def test_dtype_is_refused_where_the_graph_has_it_in_it() -> None:
    pipe = make_pipe(OfDtype(), (torch.ones(2, 4),)).double()
    with pytest.raises(StageError, match=r"input x: dtype mismatch.*, and the model does"):
        pipe(torch.ones(2, 4, dtype=torch.float64))


class Scaled(nn.Module):
    """It takes whole numbers, so that arguments do not show the dtype of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, times: float = 1) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * times + torch.finfo(x.dtype).bits * x.shape[0]


def test_forms_that_held_for_other_dtypes_are_not_trusted() -> None:
    pipe = make_pipe(Scaled().double(), (torch.ones(2, dtype=torch.int64),)).float()
    for size in (3, 2):
        with pytest.raises(StageError, match="and the model does something else"):
            pipe(torch.ones(size, dtype=torch.int64))
    copied = copy.deepcopy(pipe).double()
    assert torch.float64 is copied(torch.ones(2, dtype=torch.int64))[0].dtype


@pytest.mark.parametrize("times", [1.0, True])
def test_equal_value_of_another_type_is_another_value(times: float) -> None:
    pipe = make_pipe(Scaled(), (torch.ones(2, dtype=torch.int64), 1))
    stage = pipe.get_stage_module(0)
    with pytest.raises(StageError, match="but the model was traced with 1"):
        stage(torch.ones(2, dtype=torch.int64), times)


def test_argument_that_is_no_number_is_taken_again() -> None:
    x, times = torch.ones(2, dtype=torch.int64), float("nan")
    assert make_pipe(Scaled(), (x, times))(x, times)[0].isnan().all()


def test_other_size_is_traced_in_the_mode_of_the_first_trace() -> None:
    model = make_net().train()
    x, scale = make_inputs()
    pipe = make_pipe(model, (x, scale))
    model.eval()
    pipe.eval()
    larger = torch.cat([x, x])
    assert torch.equal(model(larger, scale), pipe(larger, scale)[0])


def test_train_and_eval_switch_dropout() -> None:
    inputs = make_inputs()
    pipe = make_pipe(make_net().train(), inputs)
    assert pipe.training
    assert not torch.equal(pipe(*inputs)[0], pipe(*inputs)[0])
    pipe.eval()
    assert torch.equal(make_net()(*inputs), pipe(*inputs)[0])


def test_nested_arguments_are_taken_as_the_model_takes_them() -> None:
    class Nested(OfSize):
        def forward(self, values: Any, times: int = 2) -> Tensor:
            x = values["x"] * values["more"][0]
            for layer in self.layers:
                x = layer(x) * times
            return x

    model, values = Nested(), {"x": torch.ones(2, 4), "more": [torch.ones(4)]}
    pipe = make_pipe(model, (values, 3))
    assert torch.equal(model(values, 3), pipe(values, 3)[0])
    with pytest.raises(StageError, match=r"input times is 4, but .* traced with 3"):
        pipe(values, 4)


def test_copy_has_parameters_of_its_own() -> None:
    inputs = make_inputs()
    pipe = make_pipe(make_net(), inputs)
    own = copy.deepcopy(pipe)
    expected = pipe(*inputs)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert_same(expected, pipe(*inputs))
    assert not torch.equal(expected[0], own(*inputs)[0])
    own.load_state_dict(pipe.state_dict())
    assert_same(pipe(*make_inputs(3)), own(*make_inputs(3)))
    x, scale = inputs
    assert torch.equal(make_net().double()(x, scale.double()), own.double()(x, scale.double())[0])
    with pytest.raises(StepError, match="split_gm was called"):
        own.split_gm(*inputs)


def test_pipe_and_stage_cannot_be_pickled() -> None:
    pipe = make_pipe(make_net(), make_inputs())
    with pytest.raises(TraceError, match="a Pipe cannot be pickled"):
        pickle.dumps(pipe)
    with pytest.raises(TraceError, match="module of a traced stage cannot be pickled"):
        pickle.dumps(pipe.get_stage_module(0))


def test_split_gm_is_for_reading() -> None:
    pipe = make_pipe(make_net(), make_inputs())
    with pytest.raises(RuntimeError, match="call the pipe itself"):
        pipe.split_gm(*make_inputs())


@pytest.mark.parametrize("index", [-1, 2])
def test_stage_that_does_not_exist_is_a_value_error(index: int) -> None:
    with pytest.raises(ValueError, match="Expected a whole number from 0 to 1"):
        make_pipe(make_net(), make_inputs()).get_stage_module(index)


def test_two_ways_to_cut_are_a_value_error() -> None:
    spec = {CUT_AT: compat.SplitPoint.BEGINNING}
    with pytest.raises(ValueError, match="split_spec and split_policy were both given"):
        compat.pipeline(make_net(), make_inputs(), None, spec, penstock.Balanced(2))


def test_last_stage_without_an_output_of_its_own_is_refused() -> None:
    class Early(OfSize):
        def forward(self, x: Tensor) -> Tensor:
            middle = self.layers[1](self.layers[0](x))
            self.layers[2](middle)
            return middle

    with pytest.raises(PartitionError, match="computes none of the model's outputs"):
        make_pipe(Early(), (torch.ones(2, 4),))


def test_from_tracing_cuts_where_a_policy_says() -> None:
    inputs = make_inputs()
    pipe = Pipe.from_tracing(make_net(), inputs, split_policy=penstock.Balanced(3))
    assert 3 == pipe.num_stages
    assert torch.equal(make_net()(*inputs), pipe(*inputs)[0])


def test_info_has_the_graph_and_makes_stages(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = make_pipe(make_net(), make_inputs())
    info = pipe.info()
    assert 2 == info.num_stages == len(info.graph.find_nodes(op="call_module"))
    assert not info.has_loss_and_backward
    assert "tied: embed.weight" in str(info)
    pipe.print_readable()
    assert "submod_pp_1" in capsys.readouterr().out
    assert "submod_pp_1" in str(pipe)
    assert "submod_pp_1" in repr(pipe)


def test_stage_has_a_module_that_was_put_in_place() -> None:
    """Clients wrap the children of split_gm, or replace them."""
    pipe = make_pipe(make_net(), make_inputs())
    other = copy.deepcopy(pipe.get_stage_module(1))
    pipe.split_gm.submod_pp_1 = other
    assert pipe.get_stage_module(1) is other
    [stage] = penstock.local_ranks(1, lambda group: pipe.build_stage(1, "cpu", group))
    assert stage.submod is other
    assert isinstance(stage, compat.PipelineStage)


def test_wrapped_stage_that_hides_shared_parameters_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(4, 4)
            self.layers = nn.ModuleList([layer, layer, nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    pipe = make_pipe(Shared(), (torch.ones(2, 4),))
    pipe.split_gm.submod_pp_0 = nn.Sequential(pipe.get_stage_module(0))
    with pytest.raises(StageError, match=r"stage 0 has no parameter 'layers.0.weight', which"):
        penstock.local_ranks(1, lambda group: pipe.build_stage(0, "cpu", group))


@pytest.mark.parametrize("kind", ["tensor", "object"])
def test_step_gives_tensors_and_sums_gradients_of_tied_parameters(kind: str) -> None:
    model, (x, scale) = make_net(kind), make_inputs(4)
    example = (x[:2], scale)
    whole = make_net()
    (whole(x, scale).square().sum() / 2).backward()
    pipe = make_pipe(model, example)

    def loss_fn(output: Any, _: Any) -> Tensor:
        logits: Tensor = output[0] if kind == "object" else output
        return logits.square().sum()

    def on_rank(group: penstock.LocalGroup) -> Any:
        stage = pipe.build_stage(group.rank, "cpu", group)
        schedule = compat.Schedule1F1B(
            stage,
            2,
            loss_fn=loss_fn,
            args_chunk_spec=(compat.TensorChunkSpec(0), compat.microbatch._Replicate()),
        )
        return schedule.step(x, scale) if group.rank == 0 else schedule.step()

    _, outputs = penstock.local_ranks(2, on_rank)
    # On some processors, a larger batch rounds differently.
    parts = [make_net(kind)(part, scale) for part in x.chunk(2)]
    if kind == "object":
        assert isinstance(outputs, tuple)
        rows = zip(*((part.logits, part.hidden) for part in parts), strict=True)
        assert_same(tuple(map(torch.cat, rows)), outputs)
    else:
        assert_same(torch.cat(parts), outputs)
    for name, stage in (("embed.weight", 0), ("head.weight", 1), ("layers.3.weight", 1)):
        own = pipe.get_stage_module(stage).get_parameter(name)
        torch.testing.assert_close(whole.get_parameter(name).grad, own.grad)
