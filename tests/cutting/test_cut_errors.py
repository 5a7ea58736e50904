"""What is said when a model cannot be cut as asked, or a cut model is called in another way."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Balanced, SplitPoint, pipe_split
from penstock.errors import (
    CostError,
    PartitionError,
    PipelineError,
    PipeliningShapeError,
    StageError,
    TraceError,
)

WIDTH = 4


class Net(nn.Module):
    """Two layers and whatever a test wants to happen with them."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self._run = run

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        if self._run is not None:
            return self._run(self, x, **kwargs)
        return self.second(torch.tanh(self.first(x)))


X = torch.ones(2, WIDTH)
CUT = {"first": SplitPoint.END}


def raises(error: type[PipelineError], *parts: str) -> Any:
    """Matches a message that has these parts in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


class TestTracing:
    def test_no_module(self) -> None:
        with raises(StageError, "module is a function. Expected a torch.nn.Module."):
            penstock.cut(lambda x: x, (X,))  # type: ignore[arg-type]

    def test_arguments_that_are_no_tuple(self) -> None:
        with raises(StageError, "mb_args is a Tensor.", "(x,) for one."):
            penstock.cut(Net(), X)  # type: ignore[arg-type]

    def test_spec_and_policy(self) -> None:
        with raises(PartitionError, "split_spec and split_policy were both given", "Give one."):
            penstock.cut(Net(), (X,), split_spec=CUT, split_policy=Balanced(2))

    def test_branch_that_depends_on_values(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            h = net.first(x)
            if h.sum() > 0:
                h = h + 1
            return net.second(h)

        with raises(
            TraceError,
            "Net cannot be traced",
            f"{__file__}:",
            "in run: if h.sum() > 0:",
            "penstock.cut_between_modules()",
        ) as caught:
            penstock.cut(Net(run), (X,))
        assert caught.value.__cause__ is not None
        lines = Path(__file__).read_text().splitlines()
        line = 1 + lines.index("            if h.sum() > 0:")
        assert f"{__file__}:{line}, in run" in str(caught.value)

    def test_forward_that_fails(self) -> None:
        with raises(TraceError, "Net cannot be traced", "RuntimeError"):
            penstock.cut(Net(), (torch.ones(2, WIDTH + 1),))

    def test_forward_that_fails_without_a_reason(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            raise KeyError

        with raises(TraceError, "KeyError: no reason given", "in run: raise KeyError"):
            penstock.cut(Net(run), (X,))

    def test_failed_tracing_leaves_no_hooks(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            return net.second(x) if net.first(x).sum() > 0 else x

        model = Net(run)
        with raises(TraceError, "cannot be traced"):
            penstock.cut(model, (X,), split_spec=CUT)
        assert not model.first._forward_hooks
        assert not model.first._forward_pre_hooks

    def test_reentrant_checkpoint(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            return net.second(checkpoint(net.first, x, use_reentrant=True))

        with raises(
            TraceError,
            "it uses checkpointing with use_reentrant=True",
            "penstock.cut_between_modules()",
        ):
            penstock.cut(Net(run), (X,))


class TestCutPoints:
    @pytest.mark.parametrize(
        "region", [torch.no_grad, partial(torch.autocast, "cpu", enabled=False)]
    )
    def test_cut_in_a_part_that_is_kept_whole(self, region: Callable[[], Any]) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            with region():
                h = net.first(x)
                pipe_split()
                h = torch.tanh(h)
            return net.second(h)

        with raises(PartitionError, "a cut point lies in a part of the forward", "Move it"):
            penstock.cut(Net(run), (X,))
        assert 1 == penstock.cut(Net(run), (X,), split_policy=Balanced(1)).num_stages

    def test_unknown_name_gives_the_closest(self) -> None:
        with raises(
            PartitionError,
            "the cut point of Net 'layers.1' does not exist.",
            "The closest are 'layers.0', 'layers'.",
            "Name a module as model.named_modules() does.",
        ):
            penstock.cut(Net(), (X,), split_spec={"layers.1": SplitPoint.END})

    def test_unknown_name_that_is_like_nothing(self) -> None:
        with raises(PartitionError, "'qqqq' does not exist. Name a module"):
            penstock.cut(Net(), (X,), split_spec={"qqqq": SplitPoint.END})

    def test_model_itself(self) -> None:
        with raises(PartitionError, "the cut point of Net '' does not exist."):
            penstock.cut(Net(), (X,), split_spec={"": SplitPoint.END})

    def test_unknown_name_leaves_no_hooks(self) -> None:
        model = Net()
        with raises(PartitionError, "'secnd' does not exist. The closest are 'second'"):
            penstock.cut(model, (X,), split_spec={**CUT, "secnd": SplitPoint.END})
        assert not model.first._forward_hooks

    def test_side_that_is_none(self) -> None:
        with raises(
            PartitionError,
            "split_spec['first'] is 'end'.",
            "Expected SplitPoint.BEGINNING or SplitPoint.END.",
        ):
            penstock.cut(Net(), (X,), split_spec={"first": "end"})  # type: ignore[dict-item]

    @pytest.mark.parametrize("name", ["layers", "norm", "layers.0"])
    def test_module_that_is_not_called(self, name: str) -> None:
        with raises(PartitionError, f"a cut at {name!r}, but", "never calls that module."):
            penstock.cut(Net(), (X,), split_spec={name: SplitPoint.END})

    def test_stage_without_operations(self) -> None:
        spec = {"first": SplitPoint.BEGINNING}
        with raises(
            PartitionError,
            "stage 0 would have nothing to compute",
            "Move a cut point, or remove it.",
        ):
            penstock.cut(Net(), (X,), split_spec=spec)

    def test_two_cuts_at_one_place(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            h = net.first(x)
            pipe_split()
            return net.second(h)

        with raises(PartitionError, "stage 1 would have nothing to compute"):
            penstock.cut(Net(run), (X,), split_spec=CUT)

    def test_cut_after_the_last_operation(self) -> None:
        with raises(PartitionError, "stage 1 would have nothing to compute"):
            penstock.cut(Net(), (X,), split_spec={"second": SplitPoint.END})

    def test_nothing_crosses(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            net.first(x)
            pipe_split()
            return net.second(torch.ones(2, WIDTH))

        with raises(
            PartitionError,
            "stage 0 makes nothing that a later stage uses",
            "Move the cut point",
        ):
            penstock.cut(Net(run), (X,))


class TestChangesInPlace:
    def test_view_over_the_boundary(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            h = net.first(x)
            part = h[:, :2]
            pipe_split()
            h.mul_(2)
            return net.second(h) + part.sum()

        with raises(
            PartitionError,
            "stage 1 changes memory in place that",
            "share; both come from earlier stages",
            "Cut the model elsewhere",
        ):
            penstock.cut(Net(run), (X,))

    def test_buffer_changed_in_two_stages(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            h = net.norm(net.first(x))
            pipe_split()
            return net.norm(net.second(h))

        with raises(
            PartitionError,
            "'norm.running_mean' is changed in the forward and used in stages 0 and 1",
            "so that one stage has everything that uses it.",
        ):
            penstock.cut(Net(run), (X,))

    def test_buffer_changed_in_one_stage_and_used_in_another(self) -> None:
        def run(net: Net, x: Tensor) -> Tensor:
            h = net.norm(net.first(x))
            pipe_split()
            return net.second(h) + net.norm.running_mean

        with raises(PartitionError, "'norm.running_mean' is changed in the forward and used in"):
            penstock.cut(Net(run), (X,))


class TestCalls:
    @pytest.fixture
    def pipe(self) -> penstock.CutModel:
        def run(net: Net, x: Tensor, *, mask: Tensor, power: int) -> Tensor:
            return net.second(net.first(x) ** power) * mask

        return penstock.cut(Net(run), (X,), {"mask": X, "power": 2}, split_spec=CUT)

    def test_other_shape(self, pipe: penstock.CutModel) -> None:
        with raises(
            PipeliningShapeError,
            "input x: shape mismatch: expected (2, 4), got (3, 4).",
            "Trace the model with an example of one microbatch as it comes in a step.",
        ):
            pipe(torch.ones(3, WIDTH), mask=X, power=2)

    def test_other_dtype(self, pipe: penstock.CutModel) -> None:
        with raises(PipeliningShapeError, "mask: dtype mismatch", "float32, got torch.float64"):
            pipe(X, mask=X.double(), power=2)

    def test_missing_keyword(self, pipe: penstock.CutModel) -> None:
        with raises(StageError, "the model was traced with", "but called with", "Call it with"):
            pipe(X, mask=X)

    def test_unknown_keyword(self, pipe: penstock.CutModel) -> None:
        with raises(
            StageError, "but called with", "mask=, power=, other=, extra=.", "Call it with"
        ):
            pipe(X, mask=X, power=2, other=X, extra=1)

    @pytest.mark.parametrize("names", [["other"], ["mask", "other", "extra"]])
    def test_keyword_that_no_stage_takes_in_a_later_stage(
        self, pipe: penstock.CutModel, names: list[str]
    ) -> None:
        # A later stage ignored every keyword argument.
        unknown = ", ".join(f"{name}=" for name in names if name != "mask")
        with raises(
            StageError,
            f"stage 1 was given the keyword arguments {unknown}, which no stage takes",
            "was traced with 1 positional arguments, mask=, power=.",
            "Leave them out, or trace the model with them.",
        ):
            pipe.get_stage_module(1)(X, X, **dict.fromkeys(names, X))

    def test_keyword_that_another_stage_takes(self, pipe: penstock.CutModel) -> None:
        module = pipe.get_stage_module(1)
        assert torch.equal(module(X, X), module(X, X, power=2, mask=X, x=X))

    def test_keyword_that_no_stage_takes_in_a_step(self, pipe: penstock.CutModel) -> None:
        def main(group: penstock.LocalGroup) -> None:
            stage = pipe.build_stage(group.rank, "cpu", group)
            pipeline = penstock.Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=mse_loss)
            x = torch.ones(4, WIDTH)
            kwargs: dict[str, Any] = {"mask": x, "power": 2}
            pipeline.step(x, target=x, **kwargs)  # The same on every rank.
            if group.rank == 1:
                kwargs["other"] = x
            pipeline.step(x, target=x, **kwargs)

        with raises(StageError, "stage 1 was given the keyword arguments other=") as caught:
            penstock.local_ranks(2, main)
        assert any("on rank 1" in note for note in caught.value.__notes__)

    def test_keyword_given_by_position(self, pipe: penstock.CutModel) -> None:
        with raises(StageError, "the model was traced with"):
            pipe(X, X, power=2)

    def test_keywords_in_another_order_are_the_same(self, pipe: penstock.CutModel) -> None:
        assert torch.equal(pipe(X, mask=X, power=2), pipe(X, power=2, mask=X))

    def test_changed_constant(self, pipe: penstock.CutModel) -> None:
        with raises(
            StageError,
            "input power is 3, but the model was traced with 2, on which its graph may depend.",
            "Give it the same, or trace the model again.",
        ):
            pipe(X, mask=X, power=3)

    def test_constant_in_place_of_a_tensor(self, pipe: penstock.CutModel) -> None:
        with raises(StageError, "mask is None, but the model was traced with a tensor"):
            pipe(X, mask=None, power=2)

    def test_tensor_in_place_of_a_constant(self, pipe: penstock.CutModel) -> None:
        with raises(StageError, "power is a tensor, but the model was traced with 2"):
            pipe(X, mask=X, power=torch.tensor(2))

    @pytest.mark.parametrize("index", [2, -1, "0", None])
    def test_stage_that_does_not_exist(self, pipe: penstock.CutModel, index: Any) -> None:
        with raises(StageError, f"stage_index is {index!r}. Expected a whole number from 0 to 1."):
            pipe.get_stage_module(index)
        with raises(StageError, "stage_index is"):
            pipe.build_stage(index, "cpu", penstock.LocalGroup)  # type: ignore[arg-type]

    def test_meta_device(self) -> None:
        with torch.device("meta"):
            model = Net()
        pipe = penstock.cut(model, (X.to("meta"),), split_spec=CUT)

        def main(group: penstock.LocalGroup) -> None:
            pipe.build_stage(0, "cpu", group)

        with raises(
            StageError, "stage 0 has parameters or buffers on the meta device", "to_empty(device="
        ):
            penstock.local_ranks(1, main)


class TestPolicies:
    def test_costs_of_too_few_layers(self) -> None:
        with raises(
            CostError, "costs has 1 values, but the model has 2 layers: first, second. Give one"
        ):
            penstock.cut(Net(), (X,), split_policy=Balanced(2, costs=[1.0]))

    def test_memory_cap_with_plain_numbers(self) -> None:
        policy = Balanced(2, costs=[1.0, 1.0], memory=1e6)
        with raises(CostError, "costs holds plain numbers", "penstock.measure_layers()"):
            penstock.cut(Net(), (X,), split_policy=policy)

    def test_costs_that_shapes_do_not_tell(self) -> None:
        def pick(h: Tensor) -> Tensor:
            return h[h[:, 0] > 0]

        with raises(CostError, "costs cannot be counted from shapes", "measure_layers()"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            penstock.count_layers(model, (X,), layers=["0", pick, "1"])

    def test_policy_of_the_user_that_puts_marks(self) -> None:
        def cut_before_second(graph_module: fx.GraphModule) -> fx.GraphModule:
            target = torch.ops.aten.linear.default
            last = graph_module.graph.find_nodes(op="call_function", target=target)[-1]
            with graph_module.graph.inserting_before(last):
                graph_module.graph.call_function(torch.ops.penstock.pipe_split.default)
            return graph_module

        model = Net()
        pipe = penstock.cut(model, (X,), split_policy=cut_before_second)
        assert 2 == pipe.num_stages
        assert torch.equal(model(X), pipe(X))


class TestSplit:
    def chain(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def test_forward_of_its_own(self) -> None:
        with raises(
            PartitionError,
            "Net has its own forward or hooks",
            "Give layers,",
            "or trace it with penstock.cut().",
        ):
            penstock.cut_between_modules(Net(), 2)

    def test_unknown_cut_point(self) -> None:
        with raises(
            PartitionError,
            "the cut point 'secnd' does not exist. The closest are 'second'",
            "Name the first layer of each later stage.",
        ):
            layers = ["first", "second", "norm", "layers"]
            penstock.cut_between_modules(Net(), ["secnd"], layers=layers)

    def test_unknown_layer(self) -> None:
        with raises(
            PartitionError,
            "the layer of Net 'frst' does not exist. The closest are 'first'",
            "Name a module as model.named_modules() does.",
        ):
            penstock.cut_between_modules(Net(), 2, layers=["frst", "second"])

    @pytest.mark.parametrize("cuts", [["0"], ["2", "1"], ["1", "1"]])
    def test_stage_without_a_layer(self, cuts: list[str]) -> None:
        with raises(
            PartitionError, f"the cut points {', '.join(cuts)} leave a stage without a layer."
        ):
            penstock.cut_between_modules(self.chain(), cuts)

    def test_policy_without_costs_and_example(self) -> None:
        with raises(
            PartitionError, "the policy has no costs, and there are no mb_args", "Give mb_args"
        ):
            penstock.cut_between_modules(self.chain(), Balanced(2))

    def test_costs_of_too_many_layers(self) -> None:
        with raises(CostError, "costs has 4 values, but the model has 3 layers: 0, 1, 2."):
            penstock.cut_between_modules(self.chain(), Balanced(2, costs=[1.0] * 4))

    def test_keyword_that_no_layer_takes(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, x: Tensor, scale: float = 1.0, **rest: Any) -> Tensor:
                assert not rest
                return super().forward(x) * scale

        model = nn.Sequential(Scaled(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        pipe = penstock.cut_between_modules(model, ["2"])
        expected = model[2](model[1](model[0](X, scale=2.0)))
        assert torch.equal(expected, pipe(X, scale=2.0))  # Both stages get it, and one takes it.
        for stage in (0, 1):
            with raises(
                StageError,
                f"stage {stage} was given the keyword arguments other=, but no layer of the model",
                "Leave them out, or let the forward of a layer name them",
            ):
                pipe.get_stage_module(stage)(X, scale=2.0, other=1)

    def test_more_stages_than_layers(self) -> None:
        with pytest.raises(PipelineError, match="4"):
            penstock.cut_between_modules(self.chain(), 4)
