"""A step's gradients are those of the mean over the whole batch, however it was cut."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from local_steps import (
    FOUR_STAGES,
    NUM_MICROBATCHES,
    WIDTH,
    assert_same,
    grads_of,
    mean_square,
    mlp,
    mlp_batch,
    randn,
    run_locally,
    step_locally,
    step_unsplit,
    zero_grad,
)
from penstock import Pipeline
from penstock.errors import MicrobatchError, StageError
from penstock.microbatches.loss_weights import (
    LossWeights,
    check_weights,
    find_weights,
    weights_by_size,
)
from stage_training import assert_close, assert_same_grads
from staged_models import Batch

every_schedule = pytest.mark.parametrize("schedule", FOUR_STAGES.values(), ids=FOUR_STAGES)
IGNORED = -100


def token_mean(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that count; not a number where there are none."""
    return functional.cross_entropy(outputs, target, ignore_index=IGNORED)


def count_tokens(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def token_batch(*, is_last_empty: bool = False) -> Batch:
    """Microbatches of 2, in which ever more tokens are ignored."""
    target = torch.randint(0, WIDTH, (2 * NUM_MICROBATCHES,))
    target[[1, 3, 4]] = IGNORED
    if is_last_empty:
        target[-2:] = IGNORED
    return Batch((randn(2 * NUM_MICROBATCHES, WIDTH),), {}, target)


@pytest.mark.parametrize(
    ("schedule", "size"),
    [*zip(FOUR_STAGES.values(), (5, 7, 9, 6), strict=True)],
    ids=FOUR_STAGES,
)
def test_uneven_batch_trains_as_the_whole(schedule: Any, size: int) -> None:
    modules, batch = mlp(), mlp_batch(size)
    assert_same(step_unsplit(modules, batch), step_locally(modules, schedule, batch))


@every_schedule
def test_mean_over_valid_tokens_trains_as_the_whole(schedule: Any) -> None:
    """Also if a microbatch has none: their mean is not a number, and neither is its gradient."""
    modules = mlp()
    for is_last_empty in (False, True):
        batch = token_batch(is_last_empty=is_last_empty)
        assert is_last_empty == token_mean(randn(2, WIDTH), batch.target[-2:]).isnan()
        expected = step_unsplit(modules, batch, token_mean)
        options = {"loss_fn": token_mean, "loss_weight": count_tokens}
        actual = step_locally(modules, schedule, batch, **options)
        assert_same(expected, actual)
        assert is_last_empty == (actual.losses[-1] == 0)


@every_schedule
def test_weights_of_given_microbatches_count(schedule: Any) -> None:
    modules, batch = mlp(), token_batch()
    expected = step_unsplit(modules, batch, token_mean)
    args = [(x,) for x in batch.args[0].tensor_split(NUM_MICROBATCHES)]
    targets = list(batch.target.tensor_split(NUM_MICROBATCHES))

    def main(pipeline: Pipeline) -> list[Tensor]:
        losses: list[Tensor] = []
        weights = [count_tokens(target) for target in targets]
        pipeline.step_microbatches(args, targets=targets, weights=weights, losses=losses)
        return losses

    losses = max(run_locally(modules, schedule, main, loss_fn=token_mean), key=len)
    assert_close("loss", expected.losses[0], torch.stack(losses).mean())
    assert_same_grads("step", expected.grads, [grads_of(modules)])


@every_schedule
def test_given_microbatches_of_other_sizes_count_by_their_rows(schedule: Any) -> None:
    modules = mlp()
    sizes = [3, 1, 4, 2]
    batch = mlp_batch(sum(sizes))
    expected = step_unsplit(modules, batch)

    def main(pipeline: Pipeline) -> None:
        args = [(x,) for x in batch.args[0].split(sizes)]
        pipeline.step_microbatches(args, targets=list(batch.target.split(sizes)))

    run_locally(modules, schedule, main, stage_options={"dynamic_shapes": True})
    assert_same_grads("step", expected.grads, [grads_of(modules)])


@every_schedule
def test_gradients_of_uneven_steps_add_up(schedule: Any) -> None:
    modules = mlp()
    batches = [mlp_batch(size) for size in (5, 8, 6)]
    expected: dict[str, Tensor] = {}
    for batch in batches:
        for name, grad in step_unsplit(modules, batch).grads.items():
            assert grad is not None
            expected[name] = expected.get(name, 0) + grad

    def main(pipeline: Pipeline) -> None:
        for batch in batches:
            pipeline.step(*batch.args, target=batch.target)

    zero_grad(modules)
    run_locally(modules, schedule, main, stage_options={"dynamic_shapes": True})
    assert_same_grads("steps", expected, [grads_of(modules)])


def test_losses_of_an_eval_have_the_mean_of_the_batch() -> None:
    modules, batch = mlp(), mlp_batch(5)
    expected = step_unsplit(modules, batch)

    def main(pipeline: Pipeline) -> list[Tensor]:
        losses: list[Tensor] = []
        pipeline.eval(*batch.args, target=batch.target, losses=losses)
        return losses

    losses = max(run_locally(modules, FOUR_STAGES["ZB-V"], main), key=len)
    assert_close("loss", expected.losses[0], torch.stack(losses).mean())


def test_plain_sum_has_no_shares() -> None:
    modules, batch = mlp(), mlp_batch(5)

    def sum_of_squares(outputs: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(outputs, target, reduction="sum")

    expected = step_unsplit(modules, batch, sum_of_squares)
    options = {"loss_fn": sum_of_squares, "scale_grads": False}
    actual = step_locally(modules, FOUR_STAGES["ZB-H1"], batch, **options)
    assert_same_grads("step", expected.grads, [actual.grads])
    assert_close("loss", expected.losses[0], torch.stack(actual.losses).sum())


def test_equal_microbatches_are_shared_out_exactly() -> None:
    """A share of 1 / m to the last bit, so that nothing is rounded that need not be."""
    for m in range(1, 100):
        loss_weights = LossWeights.of([3.0] * m, 3.0 * m, 1)
        assert [1 / m] * m == list(loss_weights.seeds)
        assert [1.0] * m == list(loss_weights.factors)


def test_sizes_are_told_by_the_inputs_where_there_is_no_target() -> None:
    """Where one rank holds the first stage and the last."""

    def loss(outputs: Tensor, _: None) -> Tensor:
        return outputs.square().mean()

    modules, batch = mlp(), mlp_batch(5)._replace(target=None)
    expected = step_unsplit(modules, batch, loss)
    actual = step_locally(modules, FOUR_STAGES["ZB-V"], batch, loss_fn=loss)
    assert_same(expected, actual)


def test_uneven_outputs_that_nothing_explains_are_refused() -> None:
    def loss(outputs: Tensor, _: None) -> Tensor:
        return outputs.square().mean()

    batch = mlp_batch(5)._replace(target=None)
    expected = (
        r"the outputs of microbatch 1 have shapes \[\(1, 6\)\], but those of the first one have \["
    )
    with pytest.raises(StageError, match=expected):
        step_locally(mlp(), FOUR_STAGES["1F1B"], batch, loss_fn=loss)


def test_targets_that_do_not_tell_how_much_a_microbatch_counts_are_refused() -> None:
    batch = mlp_batch(5)
    target = {"label": batch.target, "boxes": randn(9, 2)}

    def loss(outputs: Tensor, target: dict[str, Tensor]) -> Tensor:
        return mean_square(outputs, target["label"])

    with pytest.raises(
        MicrobatchError, match=r"tensors of target disagree on their shares.*loss_weight"
    ):
        step_locally(mlp(), FOUR_STAGES["1F1B"], batch._replace(target=target), loss_fn=loss)
    options = {"loss_fn": loss, "loss_weight": lambda target: len(target["label"])}
    whole = step_unsplit(modules := mlp(), batch)
    actual = step_locally(modules, FOUR_STAGES["1F1B"], batch._replace(target=target), **options)
    assert_same(whole, actual)


def test_given_microbatches_with_rows_of_other_lengths_are_refused() -> None:
    targets = [torch.zeros(3, 7), torch.zeros(3, 9)]
    with pytest.raises(
        MicrobatchError, match=r"7/16, 9/16 \(elements of tensor 0\); 1/2, 1/2 \(rows of tensor 0\)"
    ):
        weights_by_size(targets, name="target", are_cut=False)
    assert [21.0, 27.0] == weights_by_size(targets, name="target", are_cut=True)


def test_what_all_microbatches_share_does_not_count() -> None:
    whole = torch.zeros(7)
    own = [torch.zeros(2), torch.zeros(1)]
    values = [{"mask": whole, "x": x, "scale": torch.tensor(1.0)} for x in own]
    assert [2.0, 1.0] == weights_by_size(values, name="kwargs", are_cut=True)
    assert weights_by_size([{"mask": whole}] * 2, name="kwargs", are_cut=True) is None


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights has 1 values. Expected one for each of the 2 microbatches"),
        ([1.0, -1.0], "the weight of microbatch 1 is -1.0. Expected a number, at least 0"),
        ([math.nan, 1.0], "the weight of microbatch 0 is nan"),
        ([1.0, "two"], "the weight of microbatch 1 is 'two'"),
        ([True, 1], "the weight of microbatch 0 is True"),
        ([torch.ones(2), torch.ones(2)], "the weight of microbatch 0 is tensor"),
        (3, "weights has 1 values"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        check_weights(weights, 2)


def test_weights_may_be_tensors() -> None:
    assert [3.0, 2.0] == check_weights(torch.tensor([3, 2]), 2)
    assert [3.0, 2.0] == check_weights([torch.tensor(3), torch.tensor([2])], 2)


def test_batch_in_which_nothing_counts_is_refused() -> None:
    with pytest.raises(StageError, match=r"weights of all microbatches are \[0.0, 0.0\]"):
        LossWeights.of([0.0, 0.0], 0.0, 1)


def test_rule_without_a_target_is_refused() -> None:
    given: dict[str, list[Any]] = {"target": [], "kwargs": [{}, {}], "args": [(), ()]}
    with pytest.raises(StageError, match="has a loss_weight, but no target was given"):
        find_weights(given, weights=None, rule=len, are_cut=True)


def test_weights_of_a_step_come_before_the_rule_of_the_pipeline() -> None:
    given: dict[str, list[Any]] = {"target": [[0], [0, 1]], "args": [(), ()]}
    assert [1.0, 2.0] == find_weights(given, weights=None, rule=len, are_cut=True)
    assert [5.0, 3.0] == find_weights(given, weights=[5, 3], rule=len, are_cut=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_weight": 3}, "loss_weight is 3. Expected a function"),
        ({"loss_weight": len, "scale_grads": False}, "but scale_grads is False"),
        ({"loss_weight": len, "loss_fn": None}, "loss_weight was given, but there is no loss_fn"),
        ({"scale_grads": 1}, "scale_grads is 1. Expected True or False"),
        ({"replica_group": "dp"}, "replica_group is a str. Expected a torch.distributed"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        run_locally(mlp(), FOUR_STAGES["1F1B"], lambda pipeline: None, **options)


def test_weights_of_a_plain_sum_are_refused() -> None:
    def main(pipeline: Pipeline) -> None:
        args = [(randn(2, WIDTH),) for _ in range(NUM_MICROBATCHES)]
        pipeline.step_microbatches(args, weights=[1.0] * NUM_MICROBATCHES)

    with pytest.raises(StageError, match="weights was given, but scale_grads is False"):
        run_locally(mlp(), FOUR_STAGES["1F1B"], main, scale_grads=False)


def test_losses_that_are_no_tensors_are_weighed_if_they_are_numbers() -> None:
    loss_weights = LossWeights.of([3.0, 1.0, 0.0], 4.0, 1)
    assert 4.5 == loss_weights.weigh(0, 2.0)
    assert 0.0 == loss_weights.weigh(2, math.nan)
    assert {"loss": 2.0} == loss_weights.weigh(0, {"loss": 2.0})
    assert torch.equal(torch.ones(2), loss_weights.weigh(0, torch.ones(2)))


class Opaque:
    """An output that torch cannot look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OpaqueStage(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_outputs_that_cannot_be_looked_into_are_weighed(name: str) -> None:
    """Then the graphs of the loss and of the last stage are one."""
    modules, batch = [*mlp(3), OpaqueStage(WIDTH, WIDTH).double()], mlp_batch(5)

    def loss(outputs: Opaque, target: Tensor) -> Tensor:
        return mean_square(outputs.value, target)

    expected = step_unsplit(modules, batch, loss)
    actual = step_locally(modules, FOUR_STAGES[name], batch, loss_fn=loss)
    assert_same_grads("step", expected.grads, [actual.grads])


def test_zero_weight_with_outputs_that_cannot_be_looked_into_is_refused() -> None:
    def loss(outputs: Opaque, target: Tensor) -> Tensor:
        return token_mean(outputs.value, target)

    modules = [*mlp(3), OpaqueStage(WIDTH, WIDTH).double()]
    batch = token_batch(is_last_empty=True)
    options = {"loss_fn": loss, "loss_weight": count_tokens}
    with pytest.raises(StageError, match="a microbatch has weight 0, and the last stage returns"):
        step_locally(modules, FOUR_STAGES["ZB-H1"], batch, **options)


def test_zero_weight_of_a_frozen_model_adds_nothing() -> None:
    """All that is trained is in the loss."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return token_mean(outputs, target) * scale

    modules, batch = mlp(), token_batch(is_last_empty=True)
    for module in modules:
        module.requires_grad_(False)
    options = {"loss_fn": loss, "loss_weight": count_tokens}
    for schedule in FOUR_STAGES.values():
        scale.grad = None
        step_locally(modules, schedule, batch, **options)
        expected = step_unsplit(modules, batch, token_mean).losses[0]
        assert_close("gradient", expected, scale.grad)


def test_losses_in_half_precision_are_weighed_in_full() -> None:
    weights = LossWeights.of([1.0, 0.0, 0.0], 1.0, 1)
    losses = [weights.weigh(mb, torch.tensor(28000.0, dtype=torch.float16)) for mb in range(3)]
    assert 28000.0 == torch.stack(losses).mean()


def test_weights_may_be_numbers_of_any_kind() -> None:
    assert [3.0, 2.0, 1.0] == check_weights([np.int64(3), torch.tensor(2), 1], 3)
