import shutil
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import MODEL, PLAIN, TEXT, losses, run, saved_in

from nccl_stand_in import Pairs, use_stand_in
from penstock.comm import LocalGroup, local_ranks
from penstock.comm.channels import both_ways
from penstock.errors import AgreementError, OptionError
from penstock.ir.message import Channel
from penstock.timeline.recording import Recording
from penstock.training.saved import check_same, find_latest, kept_from_others
from penstock.training.settings import GptConfig
from penstock.training.text import Text
from penstock.training.trainer import Trained, train

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


def test_loss_falls() -> None:
    found = losses(steps=25, num_ranks=1, lr=0.03)
    assert 5.4 < found[0] < 5.7  # Guessing among 256 bytes costs log(256) = 5.55.
    assert found[-1] < 3


def test_only_rank_0_knows_and_tells_of_steps() -> None:
    told: dict[int, list[int]] = {0: [], 1: []}

    def main(group: LocalGroup) -> int:
        done = train(
            replace(PLAIN, schedule="1F1B"),
            TEXT,
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
    with pytest.raises(OptionError, match=r"--ranks is 2, but there are 1\. Give that"):
        local_ranks(1, lambda group: train(PLAIN, TEXT, group=group))


def test_ranks_with_different_texts_are_rejected() -> None:
    def main(group: LocalGroup) -> None:
        train(PLAIN, Text("", TEXT.data[group.rank :]), group=group)

    with pytest.raises(AgreementError, match="the ranks disagree on the text"):
        local_ranks(2, main)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": replace(MODEL, num_layers=5)}, "has layers 4, but --layers is 5. Leave it out"),
        ({"model": replace(MODEL, width=32)}, "has width 16, but --width is 32"),
        ({"model": GptConfig(4, 16, 1, 8)}, "has heads 2, but --heads is 1"),
        ({"model": replace(MODEL, context=4)}, "has context 8, but --context is 4"),
        ({"batch": 16}, "has batch 8, but --batch is 16"),
        ({"seed": 1}, "has seed 0, but --seed is 1"),
        ({"text": Text("", TEXT.data + b"!")}, "read a different text from .* Give the same"),
        ({"steps": 2}, "is already at step 2, and --steps is 2. Give more --steps to continue."),
    ],
)
def test_going_on_with_something_else_is_rejected(
    half_way: Path, options: dict[str, Any], expected: str
) -> None:
    text = options.get("text", TEXT)
    changed = {name: value for name, value in options.items() if name != "text"}
    config = replace(PLAIN, checkpoint=str(half_way), resume=True, **changed)
    with pytest.raises(OptionError, match=expected):
        check_same(find_latest(half_way), config, text)


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


def test_trainer_opens_the_channels_that_it_uses() -> None:
    """The loss goes by a channel of its own from the last stage's rank to rank 0."""
    lines: defaultdict[int, Pairs] = defaultdict(dict)
    config = replace(PLAIN, num_ranks=3, schedule="1F1B", steps=2)

    def main(group: LocalGroup) -> Trained:
        use_stand_in(group, lines)
        return train(config, TEXT, group=group)

    trained = local_ranks(3, main)[0]
    assert 2 == len(trained.steps)
    assert [{Channel(2, 0)}, both_ways([(0, 1), (1, 2)])] == [set(lines[0]), set(lines[1])]
