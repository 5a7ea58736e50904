"""A parallel model behaves like a module with a step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import GradientError, StageError, StepError
from spread_models import (
    NUM_MICROBATCHES,
    assert_trained_alike,
    loss_of,
    make_batch,
    make_decoder,
    on_cut_ranks,
    whole_step,
)

Pipe = penstock.ParallelModel


def test_step_gives_losses_and_outputs_where_asked_for() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> tuple[Any, ...]:
        losses: list[Tensor] = []
        loss, outputs = pipe.step(tokens, target=target, losses=losses, return_outputs=True)
        return loss.item(), outputs, [each.item() for each in losses]

    model = make_decoder()
    (loss, outputs, losses), (other, nothing, none) = on_cut_ranks(2, run, model)
    with torch.no_grad():
        expected = [model(part) for part in tokens.chunk(NUM_MICROBATCHES)]
    assert torch.equal(torch.cat(expected), outputs)
    assert NUM_MICROBATCHES == len(losses)
    assert loss == other == pytest.approx(sum(losses) / NUM_MICROBATCHES, rel=1e-15)
    assert (None, []) == (nothing, none)


def test_loss_is_shared_along_every_placement() -> None:
    """The last stage is on rank 0 in a V, and on the last rank elsewhere."""
    tokens, target = make_batch()
    expected = whole_step(make_decoder(), tokens, target)
    for schedule in ("ZB-V", "1F1B", "Interleaved1F1B"):
        found = on_cut_ranks(
            3,
            lambda pipe: pipe.step(tokens, target=target).item(),
            make_decoder(),
            schedule=schedule,
        )
        assert [expected] * 3 == pytest.approx(found, rel=1e-13)


def test_modes_are_switched_for_an_evaluation_and_put_back() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> tuple[Any, ...]:
        is_training = pipe.training
        in_eval = pipe.evaluate(tokens, target=target).item()
        again = pipe.evaluate(tokens, target=target).item()
        is_training &= pipe.training
        pipe.eval()
        stays = pipe.evaluate(tokens, target=target).item(), pipe.training
        return is_training, in_eval == again, in_eval, stays, pipe.train().training

    model = make_decoder(dropout=0.5)
    model.eval()
    expected = loss_of(model(tokens), target).item()
    model.train()
    for is_training, is_same, loss, (stays, is_in_training), is_back in on_cut_ranks(2, run, model):
        assert (True, True, False, True) == (is_training, is_same, is_in_training, is_back)
        assert [expected, expected] == pytest.approx([loss, stays], rel=1e-13)


def test_evaluation_gives_no_gradients() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> bool:
        pipe.evaluate(tokens, target=target)
        return all(weight.grad is None for weight in pipe.parameters())

    assert [True, True] == on_cut_ranks(2, run, make_decoder())


def test_gradients_of_several_steps_add_up_and_are_scaled() -> None:
    batches = [make_batch(1), make_batch(2)]

    def run(pipe: Pipe) -> dict[str, Tensor]:
        for number, (tokens, target) in enumerate(batches):
            pipe.step(tokens, target=target, finalize=number == 1, grad_scale=0.5)
        return {name: weight.grad for name, weight in pipe.named_parameters()}

    model = make_decoder()
    found = on_cut_ranks(2, run, model)
    for tokens, target in batches:
        whole_step(model, tokens, target)
    for name, weight in model.named_parameters():
        for part in found:
            if name in part:
                torch.testing.assert_close(part[name], weight.grad / 2, rtol=0, atol=1e-14)


def test_gradients_of_open_steps_cannot_be_clipped_or_added_to_others() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> None:
        pipe.step(tokens, target=target, finalize=False)
        with pytest.raises(GradientError, match="the last step had finalize=False, so gradients"):
            pipe.clip_grad_norm_(1.0)
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(1.0)
        with pytest.raises(
            StepError, match=r"tied parameter '\S+' has a gradient before a step with"
        ):
            pipe.step(tokens, target=target, finalize=False)

    on_cut_ranks(2, run, make_decoder(), schedule="1F1B")


def test_step_of_microbatches_completes_gradients_again() -> None:
    """A step with finalize=False once left the next one open too."""
    tokens, target = make_batch()
    done: list[int] = []

    def run(pipe: Pipe) -> None:
        pipe.step(tokens, target=target, finalize=False)
        pipe.pipeline.step_microbatches(
            [(part,) for part in tokens.chunk(NUM_MICROBATCHES)],
            targets=list(target.chunk(NUM_MICROBATCHES)),
        )
        pipe.clip_grad_norm_(1.0)
        done.append(pipe.rank)

    on_cut_ranks(2, run, make_decoder())
    assert [0, 1] == sorted(done)


def test_zero_grad_drops_gradients_or_sets_them_to_zero() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> tuple[bool, bool]:
        pipe.step(tokens, target=target)
        pipe.zero_grad(set_to_none=False)
        are_zero = all(not weight.grad.any() for weight in pipe.parameters())
        pipe.zero_grad()
        return are_zero, all(weight.grad is None for weight in pipe.parameters())

    assert [(True, True)] * 2 == on_cut_ranks(2, run, make_decoder())


def test_frozen_parameters_get_no_gradients() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> bool:
        pipe.requires_grad_(False)
        for name, weight in pipe.named_parameters():
            weight.requires_grad_("blocks.3" in name)
        pipe.step(tokens, target=target)
        return all(
            (weight.grad is not None) == ("blocks.3" in name)
            for name, weight in pipe.named_parameters()
        )

    assert [True, True] == on_cut_ranks(2, run, make_decoder())


def test_clipping_uses_the_norm_over_all_ranks() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> tuple[float, dict[str, Tensor]]:
        pipe.step(tokens, target=target)
        norm = pipe.clip_grad_norm_(0.01)
        return norm.item(), {name: weight.grad for name, weight in pipe.named_parameters()}

    model = make_decoder()
    found = on_cut_ranks(4, run, model, schedule="1F1B")
    whole_step(model, tokens, target)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    assert [expected] * 4 == pytest.approx([norm for norm, _ in found], rel=1e-12)
    for name, weight in model.named_parameters():
        for _, part in found:
            if name in part:
                torch.testing.assert_close(part[name], weight.grad, rtol=0, atol=1e-14)


def test_state_dict_of_the_whole_model_loads_into_each_part() -> None:
    model = make_decoder()
    state = {name: value + 1 for name, value in model.state_dict().items()}

    def run(pipe: Pipe) -> dict[str, Tensor]:
        pipe.load_state_dict(state)
        pipe.load_state_dict(pipe.state_dict())  # A rank's own part will do too.
        return pipe.state_dict()

    found = on_cut_ranks(2, run, model)
    assert state.keys() == found[0].keys() | found[1].keys()
    for part in found:
        assert all(torch.equal(value, state[name]) for name, value in part.items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nonsense": torch.zeros(1)}, "the state dict has 'nonsense', which the model does not"),
        ({"blocks.0.up.weight": None}, "the state dict lacks 'blocks.0.up.weight'"),
        ({"blocks.0.up.weight": torch.zeros(2)}, r"has shape \(2,\) in the state dict, but \(16,"),
    ],
)
def test_state_dict_that_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    model = make_decoder()
    state = {**model.state_dict(), **change}
    state = {name: value for name, value in state.items() if value is not None}

    def run(pipe: Pipe) -> None:
        pipe.load_state_dict(state)

    with pytest.raises(StageError, match=text):
        on_cut_ranks(1, run, model)


def test_optimizers_in_the_backward_train_as_one_after_the_step() -> None:
    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=0.01)

    def run(pipe: Pipe) -> tuple[dict[str, Tensor], bool]:
        assert len(pipe.optimizers) == len(pipe.stages)
        for step in range(3):
            tokens, target = make_batch(step)
            pipe.step(tokens, target=target)
        return pipe.state_dict(), all(weight.grad is None for weight in pipe.parameters())

    model = make_decoder()
    found = on_cut_ranks(2, run, model, optimizer_in_backward=make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        whole_step(model, *make_batch(step))
        optimizer.step()
    assert [True, True] == [are_dropped for _, are_dropped in found]
    assert_trained_alike(model, [state for state, _ in found])


def test_gradients_that_were_used_in_the_backward_cannot_be_changed() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> None:
        with pytest.raises(GradientError, match="before gradients can be unscaled"):
            pipe.step(tokens, target=target, scaler=penstock.GradScaler(pipe))
        pipe.step(tokens, target=target)
        with pytest.raises(GradientError, match="before gradients can be clipped"):
            pipe.clip_grad_norm_(1.0)

    on_cut_ranks(2, run, make_decoder(), optimizer_in_backward=torch.optim.AdamW)


def test_parameter_that_no_optimizer_in_the_backward_steps_is_refused() -> None:
    tokens, target = make_batch()

    def run(pipe: Pipe) -> None:
        [weight] = [w for name, w in pipe.named_parameters() if name == "blocks.3.up.weight"]
        weight.requires_grad_(True)
        with pytest.raises(StageError, match="was frozen when the optimizers that step in the"):
            pipe.step(tokens, target=target)
        pipe.optimizers[0].add_param_group({"params": [weight]})
        pipe.step(tokens, target=target)

    model = make_decoder()
    model.blocks[3].up.weight.requires_grad_(False)
    on_cut_ranks(
        1,
        run,
        model,
        optimizer_in_backward=lambda named: torch.optim.SGD(
            [weight for _, weight in named], lr=0.1
        ),
    )


def test_optimizers_in_the_backward_wait_for_the_last_of_several_steps() -> None:
    def run(pipe: Pipe) -> tuple[bool, bool]:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        tokens, target = make_batch()
        pipe.step(tokens, target=target, finalize=False)
        are_same = all(torch.equal(before[name], x) for name, x in pipe.state_dict().items())
        pipe.step(tokens, target=target)
        return are_same, any(not torch.equal(before[n], x) for n, x in pipe.state_dict().items())

    make = torch.optim.AdamW
    assert [(True, True)] * 2 == on_cut_ranks(2, run, make_decoder(), optimizer_in_backward=make)


class TestGradScaler:
    def test_gradients_are_those_without_a_scale(self) -> None:
        tokens, target = make_batch()

        def run(pipe: Pipe) -> tuple[float, dict[str, Tensor]]:
            scaler = penstock.GradScaler(pipe, init_scale=1024.0)
            loss = pipe.step(tokens, target=target, scaler=scaler, finalize=False, grad_scale=0.25)
            pipe.step(tokens, target=target, scaler=scaler, grad_scale=0.75)
            scaler.unscale_()
            return loss.item(), {name: weight.grad for name, weight in pipe.named_parameters()}

        model = make_decoder()
        found = on_cut_ranks(2, run, model)
        expected = whole_step(model, tokens, target)
        for loss, grads in found:
            assert expected == pytest.approx(loss, rel=1e-13)
            for name, weight in model.named_parameters():
                if name in grads:
                    torch.testing.assert_close(grads[name], weight.grad, rtol=0, atol=1e-14)

    def test_overflow_on_one_rank_skips_the_step_on_all(self) -> None:
        tokens, target = make_batch()

        def run(pipe: Pipe) -> tuple[bool, float, float, float]:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            scaler = penstock.GradScaler(pipe, init_scale=8.0, growth_interval=2)
            pipe.step(tokens, target=target, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            before = {name: value.clone() for name, value in pipe.state_dict().items()}
            pipe.step(tokens, target=target, scaler=scaler)
            if pipe.rank == 1:
                next(pipe.parameters()).grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            are_same = all(torch.equal(before[n], x) for n, x in pipe.state_dict().items())
            scales = [scaler.get_scale()]
            for _ in range(2):  # As many as there must be since the overflow.
                optimizer.zero_grad()
                pipe.step(tokens, target=target, scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return are_same, *scales

        assert [(True, 4.0, 4.0, 8.0)] * 2 == on_cut_ranks(2, run, make_decoder())

    def test_state_is_kept(self) -> None:
        def run(pipe: Pipe) -> float:
            scaler = penstock.GradScaler(pipe, init_scale=2.0)
            other = penstock.GradScaler(pipe)
            other.load_state_dict(scaler.state_dict())
            return other.get_scale()

        assert [2.0] == on_cut_ranks(1, run, make_decoder())

    def test_calls_in_another_order_are_refused(self) -> None:
        tokens, target = make_batch()

        def run(pipe: Pipe) -> None:
            scaler = penstock.GradScaler(pipe)
            with pytest.raises(GradientError, match=r"update\(\) was called before step"):
                scaler.update()
            pipe.step(tokens, target=target, scaler=scaler)
            scaler.unscale_()
            with pytest.raises(GradientError, match=r"unscale_\(\) was already called"):
                scaler.unscale_()
            with pytest.raises(StageError, match=r"scaler is a GradScaler\. Expected penstock"):
                pipe.step(tokens, target=target, scaler=torch.amp.GradScaler("cpu"))

        on_cut_ranks(1, run, make_decoder())

    def test_scaler_of_another_model_is_refused(self) -> None:
        tokens, target = make_batch()
        scalers: list[penstock.GradScaler] = []

        def run(pipe: Pipe) -> None:
            scalers.append(penstock.GradScaler(pipe))
            with pytest.raises(StageError, match="scaler is the GradScaler of another model"):
                pipe.step(tokens, target=target, scaler=scalers[0])

        on_cut_ranks(1, lambda pipe: scalers.append(penstock.GradScaler(pipe)), make_decoder())
        on_cut_ranks(1, run, make_decoder())

    def test_open_gradients_are_not_unscaled(self) -> None:
        tokens, target = make_batch()

        def run(pipe: Pipe) -> None:
            scaler = penstock.GradScaler(pipe)
            pipe.step(tokens, target=target, scaler=scaler, finalize=False)
            before = [weight.grad.clone() for weight in pipe.parameters()]
            with pytest.raises(GradientError, match="the last step had finalize=False"):
                scaler.unscale_()
            after = [weight.grad for weight in pipe.parameters()]
            assert all(map(torch.equal, before, after))

        on_cut_ranks(1, run, make_decoder())


@pytest.mark.parametrize("grad_scale", [0, -1.0, math.inf, math.nan, "1"])
def test_scale_that_gives_no_gradients_is_refused(grad_scale: Any) -> None:
    tokens, target = make_batch()
    with pytest.raises(StageError, match=r"grad_scale is .* Expected a positive, finite number"):
        on_cut_ranks(
            1, lambda pipe: pipe.step(tokens, target=target, grad_scale=grad_scale), make_decoder()
        )
