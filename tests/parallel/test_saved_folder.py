"""Stages are written to a folder that transformers loads, equal to the bit, or nothing changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

import penstock
from penstock.errors import PretrainedError
from penstock.parallel import Pretrained, saved_folder
from penstock.parallel.saved_folder import SavedModel, write_pretrained
from pretrained_folders import (
    cut_once,
    make_gpt2,
    make_llama,
    make_mixtral,
    make_tokens,
    next_token_loss,
    save,
)


def on_ranks(
    num_ranks: int,
    make: Callable[[], nn.Module | Pretrained],
    run: Callable[[penstock.ParallelModel], Any],
    *,
    is_cut_by_each: bool = False,
) -> list[Any]:
    shared = make()
    options = {} if is_cut_by_each or num_ranks == 1 else cut_once(shared)

    def run_rank(group: penstock.LocalGroup) -> Any:
        tokens = make_tokens()
        pipe = penstock.parallelize(
            make() if is_cut_by_each else shared,
            tokens,
            loss_fn=next_token_loss,
            num_microbatches=4,
            group=group,
            **options,
        )
        return run(pipe)

    return penstock.local_ranks(num_ranks, run_rank)


def train_and_save(folder: Path) -> Callable[[penstock.ParallelModel], dict[str, Tensor]]:
    def run(pipe: penstock.ParallelModel) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(make_tokens(), target=make_tokens())
        optimizer.step()
        pipe.save_pretrained(folder)
        return pipe.state_dict()

    return run


def assert_loads(folder: Path, states: list[dict[str, Tensor]], **options: Any) -> Any:
    expected: dict[str, Tensor] = {}
    for state in states:
        expected |= state
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, **options
    )
    assert [] == [problem for problem in report.values() if problem]
    actual = model.state_dict()
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.dtype == actual[name].dtype, name
        assert torch.equal(value, actual[name]), name
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_llama, {}),
        (make_llama, {"dtype": torch.bfloat16}),
        (lambda: make_llama(is_tied=True), {}),
        (make_gpt2, {}),
        (make_mixtral, {}),
    ],
    ids=["llama", "bfloat16", "tied", "gpt2", "merged experts"],
)
def test_transformers_loads_what_was_trained(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, Any]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    model = make()
    save(model, first)
    states = on_ranks(
        2,
        lambda: penstock.load_pretrained(first, **options),
        train_and_save(second),
        is_cut_by_each=True,
    )
    loaded = assert_loads(second, states)
    assert any(
        not torch.equal(value, loaded.state_dict()[name])
        for name, value in model.state_dict().items()
    )
    files = {path.name: set(load_file(path)) for path in second.glob("*.safetensors")}
    names = [name for held in files.values() for name in held]
    assert len(names) == len(set(names))
    saved = {name for path in first.glob("*.safetensors") for name in load_file(path)}
    assert saved == set(names)  # Tied weights once, and experts one by one.


def test_model_that_was_not_loaded_from_a_folder_is_saved_too(tmp_path: Path) -> None:
    def make() -> LlamaForCausalLM:
        return make_llama(use_cache=False).bfloat16()

    states = on_ranks(2, make, train_and_save(tmp_path / "saved"))
    assert isinstance(assert_loads(tmp_path / "saved", states), LlamaForCausalLM)


def test_one_stage_is_saved_to_one_file(tmp_path: Path) -> None:
    def run_rank(group: penstock.LocalGroup) -> dict[str, Tensor]:
        tokens = make_tokens()
        pipe = penstock.parallelize(
            make_llama(use_cache=False),
            tokens,
            loss_fn=next_token_loss,
            schedule="1F1B",
            group=group,
        )
        pipe.save_pretrained(tmp_path)
        return pipe.state_dict()

    states = penstock.local_ranks(1, run_rank)
    assert_loads(tmp_path, states)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} == names


def test_config_and_tokenizer_are_those_of_the_folder_that_was_loaded(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save(make_llama(), first)
    (first / "tokenizer.json").write_text("{}")
    (first / "notes.txt").write_text("not for others")
    on_ranks(2, lambda: penstock.load_pretrained(first), train_and_save(second))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert json.loads((first / name).read_text()) == json.loads((second / name).read_text())
    assert not (second / "notes.txt").exists()


def test_saving_again_replaces_the_model_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(make_llama(), folder, num_bytes="1GB")
    (folder / "notes.txt").write_text("mine")
    (folder / "logs").mkdir()
    (folder / "logs" / "loss.txt").write_text("1.0")
    (tmp_path / ".model.incomplete").mkdir()  # Left by a save that was killed.
    states = on_ranks(2, lambda: penstock.load_pretrained(folder), train_and_save(folder))
    assert_loads(folder, states)
    assert "mine" == (folder / "notes.txt").read_text()
    assert "1.0" == (folder / "logs" / "loss.txt").read_text()
    assert not (folder / "model.safetensors").exists()
    assert ["model"] == [path.name for path in tmp_path.iterdir()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_failure_on_one_rank_is_an_error_on_all_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(make_llama(), folder)
    before = contents(folder)

    def run(pipe: penstock.ParallelModel) -> str:
        if pipe.rank == 1:
            weight = next(pipe.parameters())
            weight.data = weight.data.to(torch.complex64)
        try:
            pipe.save_pretrained(folder)
        except PretrainedError as error:
            return str(error)
        return ""

    first, second = on_ranks(2, lambda: penstock.load_pretrained(folder), run)
    assert "has the dtype torch.complex64, which model-0000" in second
    assert second in first
    assert f"the model cannot be saved to {folder} (PretrainedError: " in first
    assert "what was there is as before" in first
    assert before == contents(folder)
    assert ["model"] == [path.name for path in tmp_path.iterdir()]


def test_save_that_is_killed_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def be_killed(*args: Any) -> None:
        raise Killed

    folder = tmp_path / "model"
    save(make_llama(), folder)
    before = contents(folder)
    monkeypatch.setattr(saved_folder, "_complete", be_killed)
    with pytest.raises(Killed):
        on_ranks(1, lambda: penstock.load_pretrained(folder), train_and_save(folder))
    assert before == contents(folder)
    monkeypatch.undo()
    states = on_ranks(1, lambda: penstock.load_pretrained(folder), train_and_save(folder))
    assert_loads(folder, states)
    assert ["model"] == [path.name for path in tmp_path.iterdir()]


def test_folder_that_cannot_take_its_place_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save(make_llama(), folder)
    before = contents(folder)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".incomplete":
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PretrainedError, match=r"cannot be saved to .* \(OSError: no\). Expected"):
        on_ranks(1, lambda: penstock.load_pretrained(folder), train_and_save(folder))
    assert before == contents(folder)
    assert ["model"] == [path.name for path in tmp_path.iterdir()]


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PretrainedError, match=r"is a file. Expected a folder, or a name for a new"):
        on_ranks(1, lambda: make_llama(use_cache=False), train_and_save(tmp_path / "file"))


def test_model_of_no_library_is_refused(tmp_path: Path) -> None:
    def run_rank(group: penstock.LocalGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = penstock.parallelize(model, torch.randn(4, 4), schedule="1F1B", group=group)
        pipe.save_pretrained(tmp_path)

    with pytest.raises(PretrainedError, match="this model is not one of transformers or PEFT"):
        penstock.local_ranks(1, run_rank)


def write_alone(folder: Path, model: Any, stages: dict[int, dict[str, Tensor]]) -> None:
    saved = SavedModel.of(model)
    assert saved is not None
    write_pretrained(folder, saved, stages, gather=lambda value, what: [value], is_first=True)


def test_stages_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    model = make_llama()
    state = dict(model.state_dict())
    del state["lm_head.weight"]
    with pytest.raises(PretrainedError, match=r"no stage holds 'lm_head.weight', which the saved"):
        write_alone(tmp_path / "saved", model, {0: state})
    assert not (tmp_path / "saved").exists()


def test_tensors_that_files_have_as_one_are_joined_or_refused(tmp_path: Path) -> None:
    model = make_llama()
    names = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    joined = WeightConverter("mlp.both.weight", names, operations=[Chunk(dim=0)])
    model._weight_conversions = [joined]
    state = dict(model.state_dict())
    write_alone(tmp_path / "saved", model, {0: state})
    found = load_file(tmp_path / "saved" / "model.safetensors")["model.layers.1.mlp.both.weight"]
    assert torch.equal(torch.cat([state[f"model.layers.1.{name}"] for name in names]), found)
    gates = {name: state.pop(name) for name in list(state) if "gate_proj" in name}
    with pytest.raises(PretrainedError, match="are saved as one tensor, but no stage holds all of"):
        write_alone(tmp_path / "again", model, {0: gates, 1: state})


def test_layers_that_share_a_weight_without_saying_so_are_refused(tmp_path: Path) -> None:
    model = make_llama()
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    with pytest.raises(
        PretrainedError, match=r"(?s)transformers cannot save this model: .*Expected lay"
    ):
        write_alone(tmp_path / "saved", model, {0: dict(model.state_dict())})


def test_folder_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    """Another rank claims to have written the first half of the model to its own disk."""
    model = make_llama()
    names = list(model.state_dict())
    first, second = (
        {name: model.state_dict()[name] for name in part} for part in (names[:10], names[10:])
    )
    forms = {0: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in first.items()}}

    def gather(value: Any, what: str) -> list[Any]:
        return [value, forms] if isinstance(value, dict) else [value, None]

    saved = SavedModel.of(model)
    assert saved is not None
    with pytest.raises(PretrainedError, match="was written by another rank, and is not there"):
        write_pretrained(tmp_path / "saved", saved, {1: second}, gather=gather, is_first=True)
