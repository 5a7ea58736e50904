"""What is refused of tied parameters and of the cut, and what is said while waiting for them."""

import re
from typing import Any

import pytest
import torch
from failing_steps import Boom, Layer, alone, assert_rejected, errors_of, mse_loss, train
from split_model import CPU, make_schedule
from torch import nn

from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.errors import AgreementError, CommError, StageError

TIED = {"linear.weight": "w"}


def train_stages(
    group: LocalGroup,
    modules: list[nn.Module],
    options: list[dict[str, Any]],
    schedule: str = "1F1B",
) -> None:
    made = make_schedule(schedule, len(modules), 2)
    stages = [
        PipelineStage(modules[i], i, len(modules), CPU, group=group, **options[i])
        for i in made.placement.stages_of(group.rank)
    ]
    train(Pipeline(stages, made, loss_fn=mse_loss))


def test_an_unknown_parameter_is_rejected_with_the_closest() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.other = nn.Embedding(2, 2), nn.Linear(2, 2)

    message = (
        "stage 0: tied names 'embedd.weight', which is not a parameter of the module. Expected "
        "names as in named_parameters(): the closest are ['embed.weight', 'other.weight']."
    )
    with pytest.raises(StageError, match=f"^{re.escape(message)}$"):
        local_ranks(
            1,
            lambda group: PipelineStage(
                Two(), 0, 1, CPU, group=group, tied={"embedd.weight": "words"}
            ),
        )


@pytest.mark.parametrize("tied", [["weight"], "weight", {"weight": 1}, {"weight": None}])
def test_what_is_no_mapping_of_names_is_rejected(tied: Any) -> None:
    message = (
        f"stage 0: tied is {tied!r}. Expected a mapping from names of parameters to the names "
        'that they share with other stages, such as {"head.weight": "embedding"}.'
    )
    assert_rejected(StageError, message, alone(tied=tied))


def test_names_are_those_of_the_module_that_was_compiled() -> None:
    module = nn.Linear(4, 4)

    def main(group: LocalGroup) -> None:
        compiled = torch.compile(module, backend="eager")
        stage = PipelineStage(compiled, 0, 1, CPU, group=group, tied={"weight": "w"})
        ((param_name, name, param),) = stage.tied_parameters()
        assert ("weight", "w") == (param_name, name)
        assert module.weight is param

    local_ranks(1, main)


def test_one_parameter_under_two_names_is_rejected() -> None:
    first, second = Layer(), Layer()
    second.linear.weight = first.linear.weight
    options = [{"tied": TIED}, {"tied": {"linear.weight": "v"}}]
    message = (
        "stage 1 ties its parameter 'linear.weight' as 'v', but the same parameter is tied as 'w' "
        "too, on rank 0. Expected one name for each parameter: use one of them on all stages."
    )
    assert_rejected(
        StageError,
        message,
        lambda group: train_stages(group, [first, second], options, "ZB-V"),
    )


@pytest.mark.parametrize(
    ("other", "described"),
    [
        (lambda: nn.Linear(4, 5), "of shape (5, 4) and torch.float32"),
        (lambda: nn.Linear(4, 4).double(), "of shape (4, 4) and torch.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_copies_that_are_not_alike_are_rejected_on_all_ranks(other: Any, described: str) -> None:
    def main(group: LocalGroup) -> None:
        modules = [nn.Linear(4, 4), nn.Linear(4, 4), other()]
        options: list[dict[str, Any]] = [{"tied": {"weight": "w"}}, {}, {"tied": {"weight": "w"}}]
        train_stages(group, modules, options)

    for error in errors_of(3, main):
        assert isinstance(error, AgreementError)
        assert (
            "the tied parameter 'w' is of shape (4, 4) and torch.float32 on rank 0 ('weight' of "
            f"stage 0), but {described} on rank 2 ('weight' of stage 2). Expected one shape and "
            "dtype on all stages that hold it, and the same part of it if it is spread over a "
            "mesh: make its copies alike, or leave them out of `tied`."
        ) == str(error)


def test_copies_whose_gradients_are_of_other_dtypes_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        modules = [Layer(), Layer()]
        modules[1].linear.weight.grad_dtype = torch.float64
        train_stages(group, modules, [{"tied": TIED}] * 2)

    for error in errors_of(2, main):
        assert isinstance(error, AgreementError)
        found = "of shape (4, 4) and torch.float32 with a gradient of torch.float64 on rank 1"
        assert found in str(error)


def test_one_object_on_two_ranks_is_rejected() -> None:
    first, second = Layer(), Layer()
    second.linear.weight = first.linear.weight
    message = (
        "the tied parameter 'w' is the same object on ranks 0 and 1 ('linear.weight' of stage 1). "
        "Expected a copy for each rank, as between processes: give each rank a copy.deepcopy of "
        "its stages."
    )
    for error in errors_of(
        2, lambda group: train_stages(group, [first, second], [{"tied": TIED}] * 2)
    ):
        assert isinstance(error, AgreementError)
        assert message == str(error)


def test_stages_of_one_rank_that_differ_in_the_cut_are_rejected() -> None:
    message = "the stages of one rank differ in cut: a, none. Give all of them the same."
    assert_rejected(
        StageError,
        message,
        lambda group: train_stages(group, [Layer(), Layer()], [{"cut": "a"}, {}], "ZB-V"),
    )


def test_ranks_that_disagree_on_the_cut_all_say_so() -> None:
    options = [{"cut": "at layers 2, 4"}, {"cut": "at layers 3, 4"}, {}]
    modules = [Layer() for _ in options]
    for error in errors_of(3, lambda group: train_stages(group, modules, options)):
        assert isinstance(error, AgreementError)
        assert (
            "the ranks disagree on the cut (rank 0: at layers 2, 4; rank 1: at layers 3, 4; "
            "rank 2: none). Expected one value on all ranks: make the pipeline in the same way "
            "everywhere."
        ) == str(error)


def test_a_step_that_fails_leaves_the_gradients_that_there_were() -> None:
    """They are set aside while a step runs."""

    def explode(grad: Any) -> None:
        raise Boom("in the backward")

    modules = [Layer(), Layer()]
    modules[0].linear.bias.register_hook(explode)
    grads = [torch.ones(4, 4) for _ in modules]
    for module, grad in zip(modules, grads, strict=True):
        module.linear.weight.grad = grad
    errors_of(2, lambda group: train_stages(group, modules, [{"tied": TIED}] * 2))
    for module, grad in zip(modules, grads, strict=True):
        assert module.linear.weight.grad is grad
        assert torch.equal(torch.ones(4, 4), grad)


def test_a_rank_that_fails_is_named_to_those_that_wait_for_its_gradient() -> None:
    def explode(grad: Any) -> None:
        raise Boom("in the backward")

    def main(group: LocalGroup) -> None:
        modules = [Layer(), Layer()]
        modules[0].linear.bias.register_hook(explode)
        train_stages(group, modules, [{"tied": TIED}] * 2)

    first, second = errors_of(2, main)
    assert isinstance(first, Boom)
    assert isinstance(second, CommError)
    assert str(second).startswith(
        "rank 1 stopped waiting for the list of tied parameters with gradients from rank 0, "
        "because rank 0 failed: Boom: in the backward"
    )
