"""A training is saved, and goes on with another number of ranks."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import rotated
from penstock.cutting import cut_between_layers
from penstock.errors import CheckpointError, StageError
from penstock.parallel import training_state
from spread_models import (
    assert_trained_alike,
    make_batch,
    make_decoder,
    on_cut_ranks,
    spread,
    whole_step,
)

Pipe = penstock.ParallelModel


def groups(named: Any) -> list[dict[str, Any]]:
    """Norms and biases without decay, as is usual."""
    decayed, others = [], []
    for name, weight in named:
        (decayed if weight.dim() > 1 else others).append((name, weight))
    found = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.005},
    ]
    return [group for group in found if group["params"]]  # A rank may have only weights.


def train(pipe: Pipe, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens, target = make_batch(step)
        optimizer.zero_grad()
        pipe.step(tokens, target=target)
        optimizer.step()


@rotated(
    kind={"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad},
    change={
        "2 to 4": (2, 4, "ZB-V", "1F1B"),
        "4 to 1": (4, 1, "ZB-V", "1F1B"),
        "4 to 2": (4, 2, "1F1B", "ZB-V"),
    },
)
def test_training_goes_on_with_other_ranks(
    kind: Any, change: tuple[int, int, str, str], tmp_path: Path
) -> None:
    """In a V, a rank has two copies of the tied weight, under its two names."""
    before, after, *schedules = change
    options = {"lr": 0.01} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})

    def begin(pipe: Pipe) -> None:
        optimizer = kind(groups(pipe.named_parameters()), **options)
        train(pipe, optimizer, range(2))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # As a scheduler would.
        pipe.save(tmp_path / "state", optimizer, extra={"step": 2, "words": ["a"]})

    def go_on(pipe: Pipe) -> tuple[dict[str, Any], dict[str, Tensor]]:
        pipe.load_state_dict({name: x + 1 for name, x in pipe.state_dict().items()})
        optimizer = kind(groups(pipe.named_parameters()), **options)
        extra = pipe.load(tmp_path / "state", optimizer)
        train(pipe, optimizer, range(2, 4))
        return extra, pipe.state_dict()

    model = make_decoder()
    on_cut_ranks(before, begin, model, schedule=schedules[0])
    found = on_cut_ranks(after, go_on, model, schedule=schedules[1])
    optimizer = kind(groups(model.named_parameters()), **options)
    for step in range(4):
        if step == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        optimizer.zero_grad()
        whole_step(model, *make_batch(step))
        optimizer.step()
    assert [{"step": 2, "words": ["a"]}] * after == [extra for extra, _ in found]
    assert_trained_alike(model, [state for _, state in found])
    assert ["state"] == [path.name for path in tmp_path.iterdir()]


def test_copies_of_a_tied_weight_on_one_rank_are_loaded(tmp_path: Path) -> None:
    """Here all stages know it by both names, and only the first of them is in the folder."""

    def on_two(run: Callable[[Pipe], Any], schedule: str, num_stages: int) -> list[Any]:
        def main(group: penstock.LocalGroup) -> Any:
            model = make_decoder()
            cut = cut_between_layers(model, num_stages, (make_batch()[0][:2],))
            return run(spread(group, model, schedule=schedule, cut=cut))

        return penstock.local_ranks(2, main)

    def begin(pipe: Pipe) -> None:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        train(pipe, optimizer, range(2))
        pipe.save(tmp_path / "state", optimizer)

    def go_on(pipe: Pipe) -> dict[str, Tensor]:
        pipe.load_state_dict({name: x + 1 for name, x in pipe.state_dict().items()})
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        pipe.load(tmp_path / "state", optimizer)
        train(pipe, optimizer, range(2, 4))
        copies = [stage.submod.embedding.weight for stage in pipe.stages.values() if pipe.rank == 0]
        assert all(torch.equal(copies[0], each) for each in copies)
        return pipe.state_dict()

    on_two(begin, "1F1B", 2)
    parts = on_two(go_on, "ZB-V", 4)
    model = make_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        whole_step(model, *make_batch(step))
        optimizer.step()
    assert_trained_alike(model, parts)


def test_settings_of_two_groups_are_not_loaded_into_one(tmp_path: Path) -> None:
    def run(pipe: Pipe) -> None:
        pipe.save(tmp_path, torch.optim.AdamW(groups(pipe.named_parameters())))
        with pytest.raises(CheckpointError, match="different settings for parameters that are in"):
            pipe.load(tmp_path, torch.optim.AdamW(pipe.parameters()))

    on_cut_ranks(1, run, make_decoder())


def test_folder_loads_into_the_whole_model(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def save(pipe: Pipe) -> None:
        pipe.load_state_dict({name: x + 1 for name, x in pipe.state_dict().items()})
        pipe.save(tmp_path / "state")

    model = make_decoder()
    expected = {name: x + 1 for name, x in model.state_dict().items()}
    on_cut_ranks(2, save, model)
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load({"model": (state := model.state_dict())}, checkpoint_id=tmp_path / "state")
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_weights_load_without_an_optimizer(tmp_path: Path) -> None:
    def save(pipe: Pipe) -> None:
        pipe.save(tmp_path / "state")

    def load(pipe: Pipe) -> dict[str, Any]:
        extra = pipe.load(tmp_path / "state")
        with pytest.raises(CheckpointError, match="has no state of an optimizer for"):
            pipe.load(tmp_path / "state", torch.optim.AdamW(pipe.parameters()))
        return extra

    on_cut_ranks(2, save, make_decoder())
    assert [{}, {}] == on_cut_ranks(2, load, make_decoder())


def test_optimizers_in_the_backward_are_saved_by_themselves(tmp_path: Path) -> None:
    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=0.01)

    def run(pipe: Pipe, steps: range) -> dict[str, Tensor]:
        if steps.start:
            pipe.load(tmp_path / "state")
        for step in steps:
            tokens, target = make_batch(step)
            pipe.step(tokens, target=target)
        pipe.save(tmp_path / "state")
        with pytest.raises(StageError, match="this model has its own, which step in the backward"):
            pipe.save(tmp_path / "other", torch.optim.AdamW(pipe.parameters()))
        return pipe.state_dict()

    model = make_decoder()
    options = {"optimizer_in_backward": make}
    on_cut_ranks(2, lambda pipe: run(pipe, range(2)), model, **options)
    found = on_cut_ranks(3, lambda pipe: run(pipe, range(2, 4)), model, schedule="1F1B", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        whole_step(model, *make_batch(step))
        optimizer.step()
    assert_trained_alike(model, found)


def test_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed: list[int] = []

    def save(pipe: Pipe) -> None:
        with pytest.raises(CheckpointError, match=r"state could not be written: NotADirectory"):
            pipe.save(tmp_path / "file" / "state")
        with pytest.raises(CheckpointError, match=r"file could not be written: NotADirectory"):
            pipe.save(tmp_path / "file")
        failed.append(pipe.rank)

    on_cut_ranks(2, save, make_decoder())
    assert [0, 1] == sorted(failed)


def test_old_folder_stays_if_the_new_one_cannot_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def fail(*_: Any) -> None:
        raise OSError("no space is left")

    def save(pipe: Pipe) -> None:
        pipe.save(tmp_path / "state", extra={"step": 1})
        pipe.pipeline.gather(None, "to change what completes a folder")
        monkeypatch.setattr(training_state, "complete_folder", fail)
        with pytest.raises(CheckpointError, match="could not be written: OSError: no space is"):
            pipe.save(tmp_path / "state", extra={"step": 2})
        failed.append(pipe.rank)

    on_cut_ranks(2, save, make_decoder())
    assert [0, 1] == sorted(failed)
    extra = on_cut_ranks(2, lambda pipe: pipe.load(tmp_path / "state"), make_decoder())
    assert [{"step": 1}] * 2 == extra


def test_folder_with_other_files_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving to "." once removed all that was there."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "work")

    def save(pipe: Pipe) -> None:
        for name in (".", "", "..", tmp_path):
            with pytest.raises(CheckpointError, match="is, or has, the current folder"):
                pipe.save(name)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match="work has other files, which would be lost"):
            pipe.save("work/")

    on_cut_ranks(1, save, make_decoder())
    assert (tmp_path / "work" / "train.py").exists()


def test_state_of_any_scheduler_is_kept(tmp_path: Path) -> None:
    """Keys that are numbers became texts, so MultiStepLR stopped at its rate."""

    def run(pipe: Pipe) -> list[float]:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
        optimizer.step()
        scheduler.step()
        pipe.save(tmp_path / "state", optimizer, extra={"scheduler": scheduler.state_dict()})
        other = torch.optim.SGD(pipe.parameters(), lr=1.0)
        again = torch.optim.lr_scheduler.MultiStepLR(other, [2, 4], gamma=0.1)
        again.load_state_dict(pipe.load(tmp_path / "state", other)["scheduler"])
        rates = []
        for _ in range(4):
            other.step()
            again.step()
            rates.append(again.get_last_lr()[0])
        return rates

    [rates] = on_cut_ranks(1, run, make_decoder())
    assert [0.1, 0.1, 0.01, 0.01] == pytest.approx(rates)


def test_save_that_was_killed_between_two_renames_is_undone(tmp_path: Path) -> None:
    def save(pipe: Pipe) -> None:
        pipe.save(tmp_path / "state", extra={"step": 1})

    on_cut_ranks(1, save, make_decoder())
    (tmp_path / "state").rename(tmp_path / ".state.replaced")
    (tmp_path / ".state.incomplete").mkdir()
    extra = on_cut_ranks(1, lambda pipe: pipe.load(tmp_path / "state"), make_decoder())
    assert [{"step": 1}] == extra
    on_cut_ranks(1, save, make_decoder())
    assert ["state"] == [path.name for path in tmp_path.iterdir()]


def test_load_that_fails_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    def run(pipe: Pipe) -> None:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        train(pipe, optimizer, range(1))
        pipe.save(tmp_path / "state", optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        for file in (tmp_path / "state").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
        kept = optimizer.state[next(pipe.parameters())]["exp_avg"].clone()
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            pipe.load(tmp_path / "state", optimizer)
        assert 0.5 == optimizer.param_groups[0]["lr"]
        assert torch.equal(kept, optimizer.state[next(pipe.parameters())]["exp_avg"])

    on_cut_ranks(1, run, make_decoder())


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda folder: (folder / "training.json").unlink(), "cannot be loaded: FileNotFoundError"),
        (lambda folder: (folder / "training.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "training.json").write_text("[]"), "TypeError"),
        (lambda folder: (folder / ".metadata").unlink(), "cannot be loaded: FileNotFoundError"),
        (
            lambda folder: (folder / "training.json").write_text(json.dumps({"format": "x"})),
            "training.json has another format",
        ),
    ],
)
def test_folder_that_is_not_whole_is_refused(break_it: Any, text: str, tmp_path: Path) -> None:
    def save(pipe: Pipe) -> None:
        pipe.save(tmp_path / "state")

    on_cut_ranks(1, save, make_decoder())
    break_it(tmp_path / "state")
    with pytest.raises(CheckpointError, match=text):
        on_cut_ranks(1, lambda pipe: pipe.load(tmp_path / "state"), make_decoder())


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    on_cut_ranks(1, lambda pipe: [pipe.save(tmp_path / "state"), None][1], make_decoder())
    smaller = make_decoder()
    del smaller.blocks[7]
    with pytest.raises(CheckpointError, match=r"has 'blocks.7.\S+', which the model does not have"):
        on_cut_ranks(1, lambda pipe: pipe.load(tmp_path / "state"), smaller)
    wider = make_decoder()
    wider.blocks[0].up = nn.Linear(8, 8).double()
    wider.blocks[0].down = nn.Linear(8, 8).double()
    with pytest.raises(CheckpointError, match="Size mismatch"):
        on_cut_ranks(1, lambda pipe: pipe.load(tmp_path / "state"), wider)


def test_extra_state_of_modules_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    def save(pipe: Pipe) -> None:
        with pytest.raises(CheckpointError, match=r"'blocks.0.up._extra_state' of the model's"):
            pipe.save(tmp_path / "state")

    model = make_decoder()
    model.blocks[0].up = Counting(8, 16).double()
    on_cut_ranks(1, save, model)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    def save(pipe: Pipe) -> None:
        with pytest.raises(CheckpointError, match="extra, or a setting of the optimizer, cannot"):
            pipe.save(tmp_path / "state", extra={"object": object()})
        with pytest.raises(CheckpointError, match="a parameter that is not one of this rank's"):
            pipe.save(tmp_path / "state", torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1)
        optimizer.state[next(pipe.parameters())]["odd"] = "a text"
        with pytest.raises(CheckpointError, match=r"keeps 'odd' of '\w+.weight' as a str"):
            pipe.save(tmp_path / "state", optimizer)

    on_cut_ranks(1, save, make_decoder())


def without_kind(folder: Path) -> None:
    """Write what earlier versions have written."""
    file = folder / "training.json"
    described = json.loads(file.read_text())
    for group in described["optimizer"]:
        del group["kind"]
    file.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("saved", "loaded", "is_known", "text"),
    [
        (torch.optim.Adam, torch.optim.SGD, True, "Adam, but the one to load is SGD"),
        (torch.optim.SGD, torch.optim.Adam, True, "SGD, but the one to load is Adam"),
        (torch.optim.Adam, torch.optim.AdamW, True, "Adam, but the one to load is AdamW"),
        (torch.optim.AdamW, torch.optim.Adam, True, "AdamW, but the one to load is Adam"),
        (torch.optim.Adam, torch.optim.SGD, False, "settings amsgrad, betas, .* load is SGD"),
        (torch.optim.SGD, torch.optim.Adam, False, "settings dampening, .* load is Adam"),
    ],
)
def test_state_of_another_optimizer_is_refused(
    saved: Any, loaded: Any, is_known: bool, text: str, tmp_path: Path
) -> None:
    """Adam's state and settings were once loaded into SGD, which made no use of them."""

    def run(pipe: Pipe) -> None:
        optimizer = saved(pipe.parameters(), lr=0.01)
        train(pipe, optimizer, range(1))
        pipe.save(tmp_path / "state", optimizer)
        if not is_known:
            without_kind(tmp_path / "state")
        other = loaded(pipe.parameters(), lr=0.5)
        with pytest.raises(CheckpointError, match=text):
            pipe.load(tmp_path / "state", other)
        assert 0.5 == other.param_groups[0]["lr"]
        assert not other.state

    on_cut_ranks(1, run, make_decoder())


class OwnAdamW(torch.optim.AdamW):
    """A user's optimizer with torch's state."""


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("save", "load"),
    [
        (
            lambda weights: torch.optim.AdamW(weights, foreach=True),
            lambda weights: torch.optim.AdamW(weights, fused=True),
        ),
        (lambda weights: torch.optim.AdamW(weights), lambda weights: OwnAdamW(weights)),
        (
            lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
            lambda weights: torch.optim.SGD(weights, 0.1),
        ),
    ],
    ids=["other implementation", "class derived from it", "momentum, which is a setting"],
)
def test_state_of_the_same_kind_of_optimizer_is_loaded(
    save: Any, load: Any, is_known: bool, tmp_path: Path
) -> None:
    def run(pipe: Pipe) -> None:
        optimizer = save(pipe.parameters())
        torch.optim.lr_scheduler.LinearLR(optimizer)  # It adds to the settings.
        train(pipe, optimizer, range(1))
        pipe.save(tmp_path / "state", optimizer)
        if not is_known:
            without_kind(tmp_path / "state")
        other = load(pipe.parameters())
        pipe.load(tmp_path / "state", other)
        for weight in pipe.parameters():
            for name, value in optimizer.state[weight].items():
                assert torch.equal(value, other.state[weight][name])

    on_cut_ranks(1, run, make_decoder())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        lambda weights: torch.optim.SGD(weights, 0.01, momentum=0.9),
    ],
    ids=["AdamW", "SGD"],
)
def test_state_gets_the_dtype_of_the_model_that_loads_it(
    make: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Steps of AdamW failed, and those of SGD mixed dtypes."""

    def save(pipe: Pipe) -> Any:
        optimizer = make(pipe.parameters())
        train(pipe, optimizer, range(1))
        pipe.save(tmp_path / "state", optimizer)
        return optimizer.state_dict()

    def load(pipe: Pipe) -> Any:
        optimizer = make(pipe.parameters())
        pipe.load(tmp_path / "state", optimizer)
        found = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(pipe.state_dict())
        train(pipe, optimizer, range(1))
        return found

    [saved] = on_cut_ranks(1, save, make_decoder().float())
    [(state, weights)] = on_cut_ranks(1, load, make_decoder().to(dtype))
    assert {dtype} == {value.dtype for value in weights.values()}
    whole = make([nn.Parameter(value) for value in weights.values()])
    whole.load_state_dict(saved)
    for number, expected in whole.state_dict()["state"].items():
        for kind, value in expected.items():
            assert value.dtype == state["state"][number][kind].dtype
            assert torch.equal(value, state["state"][number][kind])
