"""What a run is expected to need, and the refusal of what cannot fit."""

from dataclasses import replace

import pytest
import torch
from small_runs import MODEL, PLAIN, run

from penstock.errors import OptionError
from penstock.training import forecast as module
from penstock.training.forecast import Forecast, RankMemory, check_fits, forecast
from penstock.training.gpt import cut
from penstock.training.orders import choose_orders
from penstock.training.settings import TrainConfig

CPU = torch.device("cpu")
GIB = 2.0**30
BYTES_OF_LOGITS = 4 * 2 * 8 * 256


def forecast_of(config: TrainConfig) -> Forecast:
    orders = choose_orders(config)
    pieces = cut(MODEL, orders.placement, microbatch=2)
    example = torch.zeros(2, 8, dtype=torch.long)
    return forecast(config, orders, pieces, ((example,), {}), target=example)


def test_memory_is_counted_from_shapes_and_grows_with_what_a_schedule_holds() -> None:
    config = replace(PLAIN, schedule="1F1B")
    found = forecast_of(config)
    size = 4 * MODEL.num_parameters
    assert size == sum(rank.weights for rank in found.ranks)
    assert size == sum(rank.gradients for rank in found.ranks)
    assert 2 * size == sum(rank.optimizer for rank in found.ranks)
    # Rank 0 of 1F1B holds two microbatches, rank 1 one; GPipe holds all four on both. On top of
    # that, the backward of the loss makes the gradients of the logits.
    held = [rank.activations for rank in found.ranks]
    gpipe = [rank.activations for rank in forecast_of(replace(config, schedule="GPipe")).ranks]
    assert gpipe[0] == 2 * held[0]
    extra = (4 * held[1] - gpipe[1]) / 3
    assert BYTES_OF_LOGITS <= extra < held[1] < held[0]
    assert 0.2 <= found.bubble < 0.3  # 20 % for equal stages; those of ranks differ a little.


def test_schedule_to_be_found_has_no_bubble_yet_but_memory() -> None:
    found, fixed = (forecast_of(replace(PLAIN, schedule=name)) for name in ("auto", "ZB-V"))
    assert (found.ranks, None) == (fixed.ranks, found.bubble)
    assert "bubble not counted" in str(found)


def test_shards_divide_weights_and_evaluation_has_no_gradients() -> None:
    whole = forecast_of(PLAIN).ranks[0]
    half = forecast_of(replace(PLAIN, shards=2, num_microbatches=2)).ranks[0]
    assert (whole.weights / 2, whole.optimizer / 2) == (half.weights, half.optimizer)
    evaluated = forecast_of(replace(PLAIN, evaluate_only=True, eval_share=0.1)).ranks[0]
    assert (whole.weights, 0, 0) == (evaluated.weights, evaluated.gradients, evaluated.optimizer)


def test_model_that_shapes_do_not_tell_about_has_weights_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("depends on values")

    monkeypatch.setattr(module, "count_stages", fail)
    found = forecast_of(PLAIN)
    assert (None, {0.0}) == (found.bubble, {rank.activations for rank in found.ranks})


def test_training_that_cannot_fit_is_refused_unless_it_is_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = RankMemory(1, 1, 1, GIB / 2), RankMemory(GIB, GIB, 2 * GIB, GIB)
    found = Forecast((small, large), 0.1)
    capped = replace(PLAIN, memory="4GiB")
    told = r"rank 1 would hold 5 GiB: weights 1 GiB, .*, but --memory is 4GiB\. Give more --ranks"
    with pytest.raises(OptionError, match=told):
        check_fits(capped, found, CPU)
    check_fits(replace(capped, force=True), found, CPU)
    check_fits(replace(capped, memory="6GiB"), found, CPU)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(module, "_available", lambda: 5 * GIB)
    with pytest.raises(OptionError, match=r"2 ranks would need 5.5 GiB together, and this machine"):
        check_fits(PLAIN, found, CPU)
    monkeypatch.setattr(module, "_available", lambda: 6 * GIB)
    check_fits(PLAIN, found, CPU)


def test_rank_refuses_before_the_first_step() -> None:
    with pytest.raises(OptionError, match=r"--memory is 10KiB\. Give more --ranks"):
        run(memory="10KiB")
