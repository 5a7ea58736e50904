"""The norm over the gradients of all ranks, with ranks in one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage, Schedule, Schedule1F1B
from penstock.errors import AgreementError, CommError, GradientError


def run(
    modules: list[nn.Module], main: Callable[[Pipeline, int], Any], **options: Any
) -> list[Any]:
    """Call `main` on each rank, with a pipeline of one of the modules."""

    def run_rank(group: LocalGroup) -> Any:
        stage = PipelineStage(
            modules[group.rank], group.rank, len(modules), "cpu", group=group, **options
        )
        loss_fn = nn.functional.mse_loss
        return main(Schedule1F1B(stage, 2, loss_fn), group.rank)

    return penstock.local_ranks(len(modules), run_rank)


def with_grad(*values: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    module.weight.grad = torch.tensor(values, dtype=dtype)
    return module


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1, 2.0, "inf", 0.5])
def test_norm_and_gradients_are_those_of_all_ranks(norm_type: Any, foreach: bool | None) -> None:
    modules, whole = ([with_grad(3.0, -1.0), with_grad(4.0, 0.5), with_grad()] for _ in range(2))
    weights = [module.weight for module in whole]
    # torch refuses an empty tensor, as some shards are, for the norm "inf".
    expected = nn.utils.clip_grad_norm_(weights[:2], 0.1, norm_type)
    norms = run(
        modules, lambda pipeline, _: pipeline.clip_grad_norm_(0.1, norm_type, False, foreach)
    )
    for norm in norms:
        torch.testing.assert_close(norm, expected, rtol=1e-15, atol=0.0)
        assert norm.equal(norms[0])
    for module, weight in zip(modules, weights, strict=True):
        torch.testing.assert_close(module.weight.grad, weight.grad, rtol=1e-14, atol=0.0)


def test_smaller_norm_leaves_gradients_as_they_are() -> None:
    modules = [with_grad(3.0), with_grad(4.0)]
    assert [5.0, 5.0] == [
        norm.item() for norm in run(modules, lambda pipeline, _: pipeline.clip_grad_norm_(6.0))
    ]
    assert [3.0, 4.0] == [module.weight.grad.item() for module in modules]


CLIPPED = 3.0 * 1.5 / (3.0 + 1e-6)
"""A gradient of 3 that is clipped to 1.5, as torch does it: never by a division by zero."""


def test_copies_of_a_tied_parameter_count_once() -> None:
    modules = [with_grad(3.0), with_grad(3.0)]
    norms = run(
        modules, lambda pipeline, _: pipeline.clip_grad_norm_(1.5), tied={"weight": "shared"}
    )
    assert [3.0, 3.0] == [norm.item() for norm in norms]
    first, last = (module.weight.grad for module in modules)
    assert CLIPPED == pytest.approx(first.item(), rel=1e-14)
    assert first.equal(last)


def test_parameter_that_two_stages_of_a_rank_share_counts_once() -> None:
    first, last = with_grad(3.0), nn.Module()
    last.weight = first.weight

    def run_rank(group: LocalGroup) -> Tensor:
        stages = [
            PipelineStage(module, index, 2, "cpu", group=group)
            for index, module in enumerate((first, last))
        ]
        schedule = Schedule.from_csv("0F0,1F0,1B0,0B0\n")
        pipeline = Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss)
        return pipeline.clip_grad_norm_(1.5)

    assert [3.0] == [norm.item() for norm in penstock.local_ranks(1, run_rank)]
    assert CLIPPED == pytest.approx(first.weight.grad.item(), rel=1e-14)


def test_norm_of_no_gradients_is_zero() -> None:
    modules: list[nn.Module] = [nn.Linear(2, 2), nn.Identity()]
    assert [0.0, 0.0] == [
        norm.item() for norm in run(modules, lambda pipeline, _: pipeline.clip_grad_norm_(1.0))
    ]


@pytest.mark.parametrize("foreach", [True, False])
def test_norm_of_halves_does_not_overflow(foreach: bool) -> None:
    """In float16 itself, the norm of these would be infinite, and clip everything to zero."""
    modules = [with_grad(6e4, 6e4, dtype=torch.float16), with_grad(1.0, dtype=torch.bfloat16)]
    norms = run(modules, lambda pipeline, _: pipeline.clip_grad_norm_(1.0, foreach=foreach))
    expected = torch.tensor([6e4, 6e4, 1.0]).half().float().norm()
    for norm in norms:
        torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(modules[0].weight.grad, torch.full((2,), 0.5**0.5).half())


def message_of(call: Callable[[], Any]) -> tuple[type | None, str]:
    try:
        call()
    except penstock.errors.PipelineError as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((-1.0,), "max_norm is -1.0. Expected a number, at least 0"),
        ((float("nan"),), "max_norm is nan"),
        (("much",), "max_norm is 'much'"),
        ((1.0, 0), "norm_type is 0. Expected a number above 0"),
        ((1.0, float("-inf")), "norm_type is -inf"),
        ((1.0, None), "norm_type is None"),
    ],
)
def test_wrong_number_is_refused_on_all_ranks(args: tuple[Any, ...], text: str) -> None:
    modules = [with_grad(3.0), with_grad(4.0)]

    def main(pipeline: Pipeline, rank: int) -> Any:
        right = rank == 1
        return message_of(lambda: pipeline.clip_grad_norm_(*((1.0,) if right else args)))

    (kind, message), (others_kind, others_message) = run(modules, main)
    assert (GradientError, CommError) == (kind, others_kind)
    assert message.startswith(text)
    assert text in others_message


def test_sparse_gradient_is_refused() -> None:
    modules: list[nn.Module] = [nn.Embedding(4, 2, sparse=True)]
    modules[0](torch.tensor([1])).sum().backward()
    [(kind, message)] = run(
        modules, lambda pipeline, _: message_of(lambda: pipeline.clip_grad_norm_(1.0))
    )
    assert GradientError is kind
    assert message.startswith("stage 0 on rank 0, weight: the gradient has layout torch.sparse_coo")


def test_ranks_with_different_limits_all_raise_and_go_on() -> None:
    modules = [with_grad(3.0), with_grad(4.0)]

    def main(pipeline: Pipeline, rank: int) -> Any:
        found = message_of(lambda: pipeline.clip_grad_norm_(1.0 + rank))
        return found, pipeline.clip_grad_norm_(float("inf")).item()

    for (kind, message), norm in run(modules, main):
        assert AgreementError is kind
        assert message.startswith("the ranks disagree on max_norm (rank 0: 1.0; rank 1: 2.0)")
        assert 5.0 == norm


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norm_that_is_not_finite_is_an_error_if_asked(value: float, norm_type: float) -> None:
    modules = [with_grad(3.0), with_grad(value, 1.0)]

    def main(pipeline: Pipeline, rank: int) -> Any:
        return message_of(lambda: pipeline.clip_grad_norm_(1.0, norm_type, True))

    for kind, message in run(modules, main):
        assert GradientError is kind
        assert f"over the gradients of all ranks is {value}" in message
    assert 3.0 == modules[0].weight.grad.item()
    assert 1.0 == modules[1].weight.grad[1].item()


def test_rank_that_does_not_clip_is_named() -> None:
    modules: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    x, target = torch.randn(2, 4, 3)

    def main(pipeline: Pipeline, rank: int) -> Any:
        pipeline.step(x, target=target)
        if rank == 1:
            return message_of(lambda: pipeline.clip_grad_norm_(1.0))
        return None, ""

    _, (kind, message) = run(modules, main)
    assert CommError is kind
    assert "the norm of the gradients of all stages by rank 0" in message


def test_norm_after_a_step_is_that_of_the_whole_model() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]
    x, target = torch.randn(2, 4, 3).double()

    def main(pipeline: Pipeline, rank: int) -> Tensor:
        pipeline.step(x, target=target)
        return pipeline.clip_grad_norm_(0.1)

    norms = run(modules, main)
    whole = copy.deepcopy(nn.Sequential(*modules))
    whole.zero_grad()
    nn.functional.mse_loss(whole(x), target).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    for norm in norms:
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
    for weight, clipped in zip(
        whole.parameters(), nn.Sequential(*modules).parameters(), strict=True
    ):
        torch.testing.assert_close(clipped.grad, weight.grad, rtol=1e-12, atol=1e-15)
