"""One call spreads a model over ranks, and it trains as the whole model does."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import rotated
from layered_models import own_backwards, some_tokens
from penstock.errors import (
    AgreementError,
    MicrobatchError,
    PartitionError,
    ScheduleError,
    StageError,
    StepError,
)
from penstock.parallel.tied_values import _digest
from spread_models import (
    NUM_MICROBATCHES,
    Decoder,
    assert_trained_alike,
    loss_of,
    make_batch,
    make_decoder,
    on_ranks,
    whole_step,
)


def train(
    pipe: penstock.ParallelModel, num_steps: int = 3
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        tokens, target = make_batch(step)
        optimizer.zero_grad()
        losses.append(pipe.step(tokens, target=target).item())
        optimizer.step()
    return losses, pipe.state_dict()


def train_whole(model: nn.Module, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append(whole_step(model, *make_batch(step)))
        optimizer.step()
    return losses


@rotated(
    ranks={
        "1 ZB-V": (1, "ZB-V"),
        "2 ZB-V": (2, "ZB-V"),
        "3 GPipe": (3, "GPipe"),
        "4 1F1B": (4, "1F1B"),
        "2 auto": (2, "auto"),
    },
    is_tied=[False, True],
)
def test_training_equals_that_of_the_whole_model(ranks: tuple[int, str], is_tied: bool) -> None:
    num_ranks, schedule = ranks
    model = make_decoder(is_tied=is_tied)
    found = on_ranks(num_ranks, train, model, schedule=schedule)
    expected = train_whole(model)
    for losses, _ in found:
        assert expected == pytest.approx(losses, rel=1e-13)
    assert 1 == len({tuple(losses) for losses, _ in found})
    assert_trained_alike(model, [state for _, state in found])


def test_schedule_can_be_given_as_a_value() -> None:
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=4)
    model = make_decoder()
    found = on_ranks(2, train, model, schedule=schedule, num_microbatches=None)
    assert train_whole(model) == pytest.approx(found[0][0], rel=1e-13)


def test_cut_can_be_given_by_names_or_as_a_cut_model() -> None:
    tokens, _ = make_batch()
    spec = {"blocks.2": penstock.SplitPoint.BEGINNING}

    def first_names(pipe: penstock.ParallelModel) -> set[str]:
        return {name.split(".")[1] for name, _ in pipe.named_parameters() if "blocks" in name}

    for cut in (["blocks.2"], spec, penstock.cut(make_decoder(), (tokens[:2],), split_spec=spec)):
        found = on_ranks(2, first_names, make_decoder(), schedule="1F1B", cut=copy.deepcopy(cut))
        assert [{"0", "1"}, {"2", "3", "4", "5", "6", "7"}] == found


class Wide(nn.Module):
    """A model whose loss costs as much as several layers; given labels, it computes it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(24))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = (x @ self.embedding.weight.detach().T).transpose(1, 2)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_balanced_cut_counts_the_loss_unless_its_target_is_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = torch.randint(200, (8, 5))

    def own(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def layers_of_the_last_rank(loss_fn: Any, **options: Any) -> int:
        def main(group: penstock.LocalGroup) -> int:
            torch.manual_seed(0)
            pipe = penstock.parallelize(
                Wide(),
                (tokens,),
                loss_fn=loss_fn,
                schedule="1F1B",
                num_microbatches=2,
                group=group,
                **options,
            )
            return sum(name.endswith(".bias") for name, _ in pipe.named_parameters())

        first, last = penstock.local_ranks(2, main)
        assert 24 == first + last
        return last

    caplog.set_level("INFO", "penstock")
    given = layers_of_the_last_rank(own, example_target=tokens)
    assert given == layers_of_the_last_rank(nn.functional.cross_entropy)
    assert given == layers_of_the_last_rank("model", example_kwargs={"labels": tokens})
    policy = penstock.Balanced(2)
    assert given == layers_of_the_last_rank(own, example_target=tokens, cut=policy)
    assert given == layers_of_the_last_rank(nn.functional.cross_entropy, cut=policy)
    assert "does not count the loss" not in caplog.text
    assert given < layers_of_the_last_rank(own)
    assert "does not count the loss" in caplog.text


def test_names_are_the_models_own_and_copies_on_one_rank_have_their_own() -> None:
    model = make_decoder()

    def names(pipe: penstock.ParallelModel) -> list[str]:
        return [name for name, _ in pipe.named_parameters()]

    first, second = on_ranks(2, names, model)
    assert len(set(first)) == len(first)
    assert {"embedding.weight", "head.weight"} <= set(first)  # Both are on rank 0, in a V.
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == {
        *first,
        *second,
    }


def test_keyword_arguments_and_dicts_are_examples_too() -> None:
    tokens, target = make_batch()

    def main(group: penstock.LocalGroup) -> float:
        pipe = penstock.parallelize(
            make_decoder(), {"tokens": tokens}, loss_fn=loss_of, num_microbatches=4, group=group
        )
        return pipe.step(tokens=tokens, target=target).item()

    expected = whole_step(make_decoder(), tokens, target)
    assert [expected, expected] == pytest.approx(penstock.local_ranks(2, main), rel=1e-13)


class WithLoss(nn.Module):
    """A model that computes its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = make_decoder()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.decoder(tokens)
        return {"logits": logits} if labels is None else {"loss": loss_of(logits, labels)}


def test_model_may_compute_its_own_loss() -> None:
    tokens, target = make_batch()

    def main(group: penstock.LocalGroup) -> float:
        pipe = penstock.parallelize(
            WithLoss(),
            {"tokens": tokens, "labels": target},
            loss_fn="model",
            num_microbatches=4,
            group=group,
        )
        return pipe.step(tokens=tokens, labels=target).item()

    expected = whole_step(make_decoder(), tokens, target)
    assert [expected, expected] == pytest.approx(penstock.local_ranks(2, main), rel=1e-13)


def test_model_without_a_loss_of_its_own_is_refused() -> None:
    tokens, _ = make_batch()

    def main(group: penstock.LocalGroup) -> None:
        pipe = penstock.parallelize(
            WithLoss(), {"tokens": tokens}, loss_fn="model", num_microbatches=4, group=group
        )
        pipe.step(tokens=tokens)

    with pytest.raises(StageError, match=r"loss_fn is 'model', but the model returned a dict with"):
        penstock.local_ranks(2, main)


def test_outputs_in_an_object_are_not_those_of_one_microbatch() -> None:
    @dataclass
    class Result:
        value: Tensor

    class Returning(nn.Linear):
        def forward(self, x: Tensor) -> Result:
            return Result(super().forward(x))

    x = torch.randn(8, 4)

    def main(group: penstock.LocalGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Returning(4, 4))
        pipe = penstock.parallelize(
            model,
            x,
            num_microbatches=4,
            schedule="1F1B",
            cut=penstock.cut_between_modules(model, 1),
            group=group,
        )
        pipe.predict(x)

    with pytest.raises(MicrobatchError, match="the model returns a Result, which holds tensors"):
        penstock.local_ranks(1, main)


def test_model_that_cannot_be_traced_is_cut_between_its_modules() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(x) * 2

    torch.manual_seed(0)
    model = nn.Sequential(*(Odd(4, 4) for _ in range(4))).double()
    x, target = torch.randn(2, 8, 4, dtype=torch.float64)

    def main(group: penstock.LocalGroup) -> list[Tensor]:
        pipe = penstock.parallelize(
            copy.deepcopy(model), x, loss_fn=nn.functional.mse_loss, num_microbatches=4, group=group
        )
        pipe.step(x, target=target)
        return [weight.grad for weight in pipe.parameters()]

    found = penstock.local_ranks(2, main)
    for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (nn.functional.mse_loss(model(part), wanted) / 4).backward()
    expected = {weight.grad.sum().item() for weight in model.parameters()}
    assert expected == {grad.sum().item() for grads in found for grad in grads}


def test_stages_between_layers_are_not_compiled() -> None:
    tokens = some_tokens()
    with pytest.raises(StageError, match="compile is True, but the model could not be traced"):
        penstock.parallelize(own_backwards(), tokens, compile=True, num_microbatches=2)


def test_other_ranks_parameters_leave_the_model() -> None:
    """Only where ranks are processes: here, they would share one model."""
    model = make_decoder(is_tied=False)
    kept = penstock.local_ranks(2, lambda group: spread_and_look(group, model))
    assert [True, True] == kept


def spread_and_look(group: penstock.LocalGroup, model: Decoder) -> bool:
    tokens, _ = make_batch()
    penstock.parallelize(model, (tokens,), loss_fn=loss_of, num_microbatches=4, group=group)
    return not any(weight.is_meta for weight in model.parameters())


def test_number_of_microbatches_is_chosen_by_the_batch() -> None:
    def count(pipe: penstock.ParallelModel) -> int:
        return pipe.num_microbatches

    assert [4, 4] == on_ranks(2, count, make_decoder(), num_microbatches=None)
    assert [4, 4, 4] == on_ranks(3, count, make_decoder(), num_microbatches=None)


def test_number_of_microbatches_follows_the_dim_in_which_a_batch_is_cut() -> None:
    x = torch.randn(7, 8, 4)

    def main(group: penstock.LocalGroup) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        spec = (penstock.TensorChunkSpec(1),)
        return penstock.parallelize(
            model, x, loss_fn=nn.functional.mse_loss, args_chunk_spec=spec, group=group
        ).num_microbatches

    assert [4, 4] == penstock.local_ranks(2, main)


def test_tied_values_are_compared_alike_with_any_number_of_threads() -> None:
    weight = torch.randn(1000, 301)
    num_threads = torch.get_num_threads()
    found = set()
    for number in (1, 3):
        torch.set_num_threads(number)
        found.add(_digest(weight))
    torch.set_num_threads(num_threads)
    found.add(_digest(weight.t().contiguous().t()))
    assert 1 == len(found)
    changed = weight.clone()
    changed[3, 5] += 1e-3
    assert found != {_digest(changed)}
    swapped = weight.flip(0)
    assert found != {_digest(swapped)}


def test_tied_copies_that_differ_are_refused() -> None:
    def main(group: penstock.LocalGroup) -> None:
        tokens, _ = make_batch()
        torch.manual_seed(group.rank)
        penstock.parallelize(
            Decoder(),
            (tokens,),
            loss_fn=loss_of,
            schedule="1F1B",
            num_microbatches=4,
            group=group,
        )

    with pytest.raises(AgreementError, match=r"'embedding.weight' has other values as .*rank 1"):
        penstock.local_ranks(2, main)


def test_model_that_was_traced_in_eval_mode_cannot_be_trained_later() -> None:
    def run(pipe: penstock.ParallelModel) -> bool:
        with pytest.raises(StageError, match="the model was traced in evaluation mode"):
            pipe.train()
        return pipe.training

    assert [False] == on_ranks(1, run, make_decoder(dropout=0.5).eval())


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_what_a_launcher_sets_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "1")
    with pytest.raises(StageError, match=f"only {name} is set, so it is not known which"):
        penstock.parallelize(make_decoder(), make_batch()[0], loss_fn=loss_of)


def test_representation_shows_the_part_of_the_rank() -> None:
    found = on_ranks(2, repr, make_decoder())
    assert "ParallelModel(rank 1 of 2, stages 1, 2 of 4, 4 microbatches)" == found[1]


def test_assignment_without_effect_is_refused() -> None:
    def assign(pipe: penstock.ParallelModel) -> None:
        pipe.num_microbatches = 3  # type: ignore[misc]

    with pytest.raises(AttributeError, match="num_microbatches of a ParallelModel cannot be"):
        on_ranks(1, assign, make_decoder())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"num_microbatches": 3},
            MicrobatchError,
            "a batch of 8, which cannot be cut into 3 equal",
        ),
        ({"cut": "blocks.2"}, StageError, r"cut is 'blocks.2'. Expected names of modules"),
        ({"cut": ["blocks.2"]}, StageError, "was cut into 2 stages, but the schedule has 4 on 2"),
        ({"cut": 3}, StageError, "cut is a int. Expected names of modules at which stages begin"),
        ({"cut": ["nowhere"]}, PartitionError, "nowhere"),
        ({"fsdp_options": {"offload_policy": None}}, StageError, "but nothing is sharded"),
        ({"tp_plan": {"head": None}}, StageError, "tensor parallelism needs both a mesh"),
        ({"schedule": "ZB-X"}, ScheduleError, "ZB-X"),
        ({"loss_fn": "Model"}, StageError, "loss_fn is 'Model'. Expected a function of the output"),
        ({"cut": penstock.Balanced(2)}, StageError, "was cut into 2 stages, but the schedule has"),
        ({"cut": ["blocks.2"], "example_target": make_batch()[1]}, StageError, "the cut was given"),
        (
            {"cut": penstock.Balanced(4, costs=[1.0] * 10), "example_target": make_batch()[1]},
            StageError,
            "the cut was given too, and does not count it",
        ),
        ({"loss_fn": None, "example_target": make_batch()[1]}, StageError, "there is no loss_fn"),
        (
            {"loss_fn": "model", "example_target": make_batch()[1]},
            StageError,
            "the model computes it",
        ),
        ({"mesh": "pp"}, StageError, "mesh and group were both given"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        on_ranks(2, train, make_decoder(), **options)


def test_schedule_for_other_numbers_is_refused() -> None:
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=3, num_microbatches=4)
    with pytest.raises(ScheduleError, match="the number of ranks is 2, but the schedule is for 3"):
        on_ranks(2, train, make_decoder(), schedule=schedule)
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=8)
    with pytest.raises(ScheduleError, match="num_microbatches is 4, but the schedule is for 8"):
        on_ranks(2, train, make_decoder(), schedule=schedule)


def test_example_without_a_batch_is_refused() -> None:
    with pytest.raises(MicrobatchError, match="example has no tensor that could be cut"):
        penstock.local_ranks(1, lambda group: penstock.parallelize(make_decoder(), group=group))
    both = {"example": {"tokens": make_batch()[0]}, "example_kwargs": {}}
    with pytest.raises(StageError, match="example is a dict of keyword arguments, and"):
        penstock.local_ranks(
            1, lambda group: penstock.parallelize(make_decoder(), group=group, **both)
        )


def test_without_a_loss_the_model_only_predicts() -> None:
    tokens, target = make_batch()

    def predict(pipe: penstock.ParallelModel) -> Tensor | None:
        return pipe.predict(tokens)

    model = make_decoder()
    first, second = on_ranks(2, predict, model, loss_fn=None)
    assert torch.equal(torch.cat([model(part) for part in tokens.chunk(NUM_MICROBATCHES)]), first)
    assert second is None
    with pytest.raises(StepError, match="without a loss_fn, so there is nothing to train"):
        on_ranks(1, lambda pipe: pipe.step(tokens, target=target), model, loss_fn=None)
    with pytest.raises(StepError, match="without a loss_fn, so there is no loss to return"):
        on_ranks(1, lambda pipe: pipe.evaluate(tokens, target=target), model, loss_fn=None)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_model_that_is_one_module_trains_on_one_stage(schedule: str) -> None:
    """Its only layer has no name that the graph of a stage could call: that failed in torch."""
    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    whole = copy.deepcopy(model)
    loss_fn = nn.functional.mse_loss
    pipe = penstock.parallelize(
        model, example=(x,), loss_fn=loss_fn, num_microbatches=1, schedule=schedule
    )
    loss = pipe.step(x, target=target)
    expected = loss_fn(whole(x), target)
    expected.backward()
    torch.testing.assert_close(expected.double(), loss)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert {"weight", "bias"} == grads.keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter.grad, grads[name])
