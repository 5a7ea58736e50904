import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import DATA, MODEL, PLAIN, losses, run, saved_in
from torch import Tensor, nn

import penstock
from penstock.comm import LocalGroup, local_ranks
from penstock.errors import AgreementError, OptionError
from penstock.timeline.recording import Recording
from penstock.training.choices import Data
from penstock.training.documents import Documents
from penstock.training.gpt_sizes import GptConfig
from penstock.training.sampling import continue_text
from penstock.training.saved import check_same, find_latest, kept_from_others
from penstock.training.trainer import train

# A full backward and its two halves round differently in their products: a few bits of a loss.
ROUNDING = 1e-5
WAYS = [
    {"num_ranks": 1, "schedule": "1F1B"},
    {"num_ranks": 1, "schedule": "ZB-V"},
    {"num_ranks": 2, "schedule": "ZB-V"},
    {"num_ranks": 3, "schedule": "GPipe"},
    {"num_ranks": 3, "schedule": "Interleaved1F1B", "stages_per_rank": 2},
    {"num_ranks": 4, "schedule": "ZB-H1"},
    {"num_ranks": 2, "schedule": "auto"},
]
FEATURES = [
    {"clip": 0.5, "warmup": 2, "min_lr": 0.001, "autocast": "bfloat16"},
    {"accumulate": 2, "dtype": "bfloat16"},
    {"dtype": "float64", "weight_decay": 0.5},
]
"""Each changes the training, and none of them what ranks have to do with it."""


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return losses(num_ranks=1, schedule="GPipe")


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a training that ended after two of four steps."""
    folder = tmp_path_factory.mktemp("half way")
    run(checkpoint=str(folder), steps=2)
    return folder


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_run_resumed_in_any_way_goes_on_as_if_it_had_not_ended(
    uninterrupted: list[float], half_way: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    found = losses(checkpoint=str(tmp_path), resume=True, **way)
    assert uninterrupted[2:] == pytest.approx(found, rel=ROUNDING)


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_feature_gives_the_same_losses_on_any_number_of_ranks_and_when_resumed(
    uninterrupted: list[float], tmp_path: Path, feature: dict[str, Any]
) -> None:
    folder = str(tmp_path)
    expected = losses(checkpoint=folder, num_ranks=1, schedule="ZB-H1", keep=9, **feature)
    assert uninterrupted != expected
    assert expected == losses(num_ranks=2, schedule="ZB-V", **feature)
    # As if it was stopped: the last step, to which the learning rate falls, stays the same.
    shutil.rmtree(tmp_path / "step-000004")
    found = losses(checkpoint=folder, resume=True, num_ranks=4, schedule="ZB-H1", **feature)
    assert expected[2:] == found


@pytest.mark.parametrize(
    ("first", "others"), [("GPipe", ("1F1B", "Interleaved1F1B")), ("ZB-H1", ("ZB-H2", "ZB-V"))]
)
def test_losses_do_not_depend_on_the_cut_to_the_last_bit(
    first: str, others: tuple[str, ...]
) -> None:
    """Each microbatch adds to a gradient in the same order; so large that products are tiled."""
    model = GptConfig(num_layers=4, width=192, num_heads=4, context=32)
    expected = losses(num_ranks=1, schedule=first, model=model)
    for name in others:
        assert expected == losses(num_ranks=2, schedule=name, model=model)


def test_other_number_of_microbatches_changes_only_the_order_of_additions(
    uninterrupted: list[float], half_way: Path, tmp_path: Path
) -> None:
    shutil.copytree(half_way, tmp_path, dirs_exist_ok=True)
    found = losses(checkpoint=str(tmp_path), resume=True, num_microbatches=2)
    # Sums over 4 sequences in place of 2: a few roundings of 32-bit numbers, in two steps.
    assert uninterrupted[2:] == pytest.approx(found, rel=1e-5)


def test_accumulated_batches_train_as_one_larger_batch() -> None:
    def figures(**options: Any) -> list[tuple[float, float | None]]:
        done = run(num_ranks=1, dtype="float64", clip=1e9, **options)
        return [(step.loss, step.grad_norm) for step in done.steps]

    parts = figures(batch=4, accumulate=2, num_microbatches=2)
    for whole, part in zip(figures(batch=8), parts, strict=True):
        assert whole == pytest.approx(part, rel=1e-9)


def test_loss_falls() -> None:
    found = losses(steps=25, num_ranks=1, lr=0.03)
    assert 5.4 < found[0] < 5.7  # Guessing among 256 bytes costs log(256) = 5.55.
    assert found[-1] < 3


def test_only_rank_0_knows_and_tells_of_steps() -> None:
    told: dict[int, list[int]] = {0: [], 1: []}

    def main(group: LocalGroup) -> int:
        done = train(
            replace(PLAIN, schedule="1F1B"),
            DATA,
            group=group,
            on_step=lambda done: told[group.rank].append(done.step),
        )
        return len(done.steps)

    assert [4, 0] == local_ranks(2, main)
    assert {0: [1, 2, 3, 4], 1: []} == told


def test_speed_is_the_median_of_tokens_over_time() -> None:
    trained = run(steps=3, num_ranks=1)
    for done in trained.steps:
        assert 64 == pytest.approx(done.tokens_per_s * done.duration_s)
    second, third = trained.steps[1].tokens_per_s, trained.steps[2].tokens_per_s
    assert (second + third) / 2 == trained.tokens_per_s
    alone = run(steps=1, num_ranks=1)
    assert alone.steps[0].tokens_per_s == alone.tokens_per_s


def test_checkpoints_come_at_their_steps_and_at_the_end_and_two_stay(tmp_path: Path) -> None:
    run(checkpoint=str(tmp_path), steps=7, every=2, num_ranks=1)
    assert ["step-000006", "step-000007"] == saved_in(tmp_path)


def test_recording_has_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trained = run(record=str(path))
    recording = Recording.load(path)
    assert 4 == len(recording.steps)
    assert trained.schedule == recording.schedule


def test_loss_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(OptionError, match=r"the loss is nan in step \d. Train with a smaller --lr"):
        losses(lr=1e30, schedule="1F1B")


def test_other_number_of_ranks_than_there_are_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"but there are 1\. Give that"):
        local_ranks(1, lambda group: train(PLAIN, DATA, group=group))


def test_ranks_with_different_data_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        [text] = DATA.documents.parts
        train(PLAIN, Data(Documents((), (text[group.rank :],))), group=group)

    with pytest.raises(AgreementError, match="the ranks disagree on the data"):
        local_ranks(2, main)


def test_pipelines_need_processes() -> None:
    config = replace(PLAIN, replicas=2, num_ranks=1)
    with pytest.raises(OptionError, match="--replicas and --shards need processes"):
        local_ranks(2, lambda group: train(config, DATA, group=group))


def test_evaluation_is_on_held_out_data_and_the_same_on_any_number_of_ranks() -> None:
    options = {"eval_share": 0.2, "eval_every": 2, "steps": 5}
    expected = run(num_ranks=1, schedule="ZB-H1", **options)
    found = run(num_ranks=2, schedule="ZB-V", **options)
    assert [2, 4, 5] == [each.step for each in found.evaluated]
    assert expected.evaluated == found.evaluated
    first, *_, last = found.evaluated
    assert last.loss < first.loss
    assert math.exp(last.loss) == pytest.approx(last.perplexity)
    assert losses(steps=5, schedule="ZB-V") != [done.loss for done in found.steps]
    apart = run(Data(DATA.documents, Documents(("other",), (b"a fox " * 20,))), eval_data=("x",))
    assert [4] == [each.step for each in apart.evaluated]


def test_evaluation_alone_is_that_of_the_last_checkpoint(tmp_path: Path) -> None:
    options = {"eval_share": 0.2, "checkpoint": str(tmp_path), "steps": 2}
    expected = run(num_ranks=2, **options)
    found = run(num_ranks=1, resume=True, evaluate_only=True, **options)
    assert ((), expected.evaluated) == (found.steps, found.evaluated)


def test_text_is_continued_by_the_likeliest_tokens() -> None:
    options = {"steps": 60, "lr": 0.02, "sample": "the quick "}
    found = run(num_ranks=1, schedule="ZB-H1", **options).sample
    assert found.startswith("the quick ")
    assert 64 + len("the quick ") == len(found)
    assert found == run(num_ranks=2, schedule="ZB-V", **options).sample


def test_token_is_continued_after_the_last_one_that_is_seen() -> None:
    """A prompt that is shorter than the context has zeros after it."""

    def main(group: LocalGroup) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4))
        pipe = penstock.parallelize(model, torch.ones(2, 4), group=group, schedule="1F1B")

        def next_ones(tokens: Tensor) -> Tensor:
            return nn.functional.one_hot(tokens + 1, 16)

        return continue_text(pipe, [5], rows=2, context=4, predict=next_ones, end=11, count=9)

    assert [[6, 7, 8, 9, 10, 11]] == local_ranks(1, main)


def test_only_some_steps_are_measured_and_auto_has_no_bubble_in_its_first() -> None:
    done = run(steps=40, schedule="auto").steps
    assert [step % 2 == 0 for step in range(1, 41)] == [each.seen is not None for each in done]
    assert all(0 <= each.seen.bubble < 1 for each in done if each.seen)
    assert run(steps=1, schedule="auto").steps[0].seen.bubble is None
    assert done[-1].seen.memory_bytes > 10_000_000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": replace(MODEL, num_layers=5)}, "has layers 4, but --layers is 5. Leave it out"),
        ({"model": replace(MODEL, width=32)}, "has width 16, but --width is 32"),
        ({"model": GptConfig(4, 16, 1, 8)}, "has heads 2, but --heads is 1"),
        ({"model": replace(MODEL, context=4)}, "has context 8, but --context is 4"),
        ({"batch": 16}, "has batch 8, but --batch is 16"),
        ({"seed": 1}, "has seed 0, but --seed is 1"),
        ({"accumulate": 2}, "has accumulate 1, but --accumulate is 2"),
        ({"dtype": "bfloat16"}, "has dtype float32, but --dtype is bfloat16"),
        ({"eval_share": 0.5}, "has eval-share 0.0, but --eval-share is 0.5"),
        ({"data": Documents((), (b"!",))}, "had another --data than now. Give the same data"),
        ({"tokenizer": __file__}, "had another --tokenizer than now. Give the same tokenizer"),
        ({"steps": 2}, "is already at step 2, and --steps is 2. Give more --steps to continue."),
    ],
)
def test_going_on_with_something_else_is_rejected(
    half_way: Path, options: dict[str, Any], expected: str
) -> None:
    changed = {"data": (), **options}
    documents = changed.pop("data") or DATA.documents
    config = replace(PLAIN, checkpoint=str(half_way), resume=True, **changed)
    with pytest.raises(OptionError, match=expected):
        check_same(find_latest(half_way), config, documents)


def test_rank_itself_checks_what_it_goes_on_with(half_way: Path) -> None:
    with pytest.raises(OptionError, match="has seed 0, but --seed is 1"):
        run(checkpoint=str(half_way), resume=True, num_ranks=1, seed=1)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such lock")
def test_second_training_in_one_folder_at_once_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        kept_from_others(str(folder)),
        pytest.raises(OptionError, match=f"another training is saving to {folder}"),
    ):
        run(checkpoint=str(folder))
    assert 4 == len(run(checkpoint=str(folder)).steps)
