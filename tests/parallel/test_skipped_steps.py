"""Steps of a parallelized model whose loss or gradients are not finite."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import StageError


def run_ranks(use: Any, num_ranks: int = 2, **options: Any) -> list[Any]:
    """Return what `use` returns on each rank, for a model of eight layers and a batch."""

    def main(group: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        x, target = torch.randn(2, 8, 4)
        with_loss = {"loss_fn": nn.functional.mse_loss, **options}
        return use(penstock.parallelize(model, x, group=group, **with_loss), x, target)

    return penstock.local_ranks(num_ranks, main)


def spoil(x: Tensor) -> Tensor:
    x = x.clone()
    x[3, 0] = math.nan
    return x


def values_of(pipe: penstock.ParallelModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in pipe.parameters()]


def test_optimizer_does_not_change_anything_after_a_skipped_step() -> None:
    def use(pipe: penstock.ParallelModel, x: Tensor, target: Tensor) -> Any:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
        found = []
        for given in (x, spoil(x), x):
            optimizer.zero_grad()
            before = values_of(pipe)
            loss = pipe.step(given, target=target)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            is_same = all(map(torch.equal, before, values_of(pipe)))
            found.append((pipe.bad_value is not None, is_same, bool(loss.isfinite())))
        assert [(False, False, True), (True, True, False), (False, False, True)] == found
        return values_of(pipe)

    def use_good_ones(pipe: penstock.ParallelModel, x: Tensor, target: Tensor) -> Any:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(x, target=target)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        return values_of(pipe)

    expected = run_ranks(use_good_ones)
    for one, other in zip(expected, run_ranks(use, bad_values="skip"), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("bad_values", ["skip", "report", None])
def test_scale_becomes_smaller_after_a_step_that_is_not_finite(bad_values: str | None) -> None:
    def use(pipe: penstock.ParallelModel, x: Tensor, target: Tensor) -> Any:
        scaler = penstock.GradScaler(pipe, init_scale=4.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scales = []
        for given in (x, spoil(x), x):
            before = values_of(pipe)
            optimizer.zero_grad()
            pipe.step(given, target=target, scaler=scaler)
            scaler.unscale_()
            scaler.step(optimizer)
            scaler.update()
            scales.append((scaler.get_scale(), all(map(torch.equal, before, values_of(pipe)))))
        return scales

    expected = [(4.0, False), (2.0, True), (2.0, False)]
    assert [expected, expected] == run_ranks(use, bad_values=bad_values)


def test_step_with_the_name_of_a_module_in_the_model() -> None:
    def use(pipe: penstock.ParallelModel, x: Tensor, target: Tensor) -> Any:
        for name, parameter in pipe.named_parameters():
            if name == "5.weight":
                parameter.data[0, 0] = math.nan
        pipe.step(x, target=target)
        return pipe.bad_value.place  # type: ignore[union-attr]

    assert {"module 5"} == set(run_ranks(use, bad_values="report"))


def test_optimizers_in_the_backward_cannot_skip() -> None:
    with pytest.raises(StageError, match=r"bad_values is 'skip', but with optimizer_in_backward"):
        run_ranks(
            lambda *_: None,
            bad_values="skip",
            optimizer_in_backward=lambda named: torch.optim.SGD(named, lr=0.1),
        )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_traced(name: str, num_stages: int, **options: Any) -> Any:
    """Return what ranks find in a model that was traced, with NaN in the weight of this name."""

    def main(group: Any) -> Any:
        torch.manual_seed(0)
        model = Traced()
        x, target = torch.randn(2, 8, 4)
        pieces = penstock.cut(model, (x[:2],), split_policy=penstock.Balanced(num_stages))
        pipe = penstock.parallelize(
            model, x, cut=pieces, group=group, loss_fn=nn.functional.mse_loss, **options
        )
        for known, parameter in pipe.named_parameters():
            if known == name:
                parameter.data[0, 0] = math.nan
        pipe.step(x, target=target)
        grads = [p.grad for p in pipe.parameters()]
        return pipe.bad_value and pipe.bad_value.place, grads

    return penstock.local_ranks(2, main)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_modules_of_a_traced_model_are_named(schedule: str) -> None:
    options = {"schedule": schedule, "num_stages": 4 if schedule == "ZB-V" else 2}
    for place, _ in train_traced("blocks.2.wide.weight", bad_values="report", **options):
        assert "module blocks.2.wide" == place
    expected = train_traced("", **options)
    for (_, one), (_, other) in zip(
        expected, train_traced("", bad_values="skip", **options), strict=True
    ):
        assert all(map(torch.equal, one, other))
