"""A model in a folder: each stage reads its own tensors, as transformers would have loaded them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, LlamaModel

import penstock
from penstock.errors import PretrainedError
from penstock.parallel import Pretrained, safetensors_folder
from penstock.parallel.safetensors_folder import SafetensorsFolder
from pretrained_folders import (
    cut_in_two,
    cut_once,
    grads_of_whole,
    make_gpt2,
    make_gpt2_body,
    make_llama,
    make_mixtral,
    make_tokens,
    next_token_loss,
    save,
)


def fill_all(pretrained: Pretrained) -> list[nn.Module]:
    pieces = cut_in_two(pretrained)
    for module in pieces.modules:
        pretrained.fill(module, "cpu")
    return list(pieces.modules)


def assert_filled_like(whole: nn.Module, modules: list[nn.Module]) -> None:
    expected = dict(whole.state_dict()) | dict(whole.named_buffers())
    actual: dict[str, Tensor] = {}
    for module in modules:
        actual |= module.state_dict() | dict(module.named_buffers())
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.dtype == actual[name].dtype, name
        assert torch.equal(value, actual[name]), name


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (make_llama, "10KB"),
        (make_llama, "1GB"),
        (lambda: make_llama(is_tied=True), "10KB"),
        (lambda: make_llama(rope_parameters={"rope_type": "linear", "factor": 2.0}), "1GB"),
        (make_gpt2, "10KB"),
        (make_mixtral, "10KB"),
    ],
    ids=["llama", "one file", "tied", "scaled rotations", "gpt2", "merged experts"],
)
def test_stages_hold_what_transformers_loads(
    tmp_path: Path, make: Callable[[], Any], num_bytes: str
) -> None:
    model = make()
    save(model, tmp_path, num_bytes=num_bytes)
    whole = type(model).from_pretrained(tmp_path)
    assert_filled_like(whole, fill_all(penstock.load_pretrained(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_stages_have_the_dtype_that_is_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    save(make_llama(), tmp_path)
    whole = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_filled_like(whole, fill_all(penstock.load_pretrained(tmp_path, dtype=dtype)))


def test_tensors_are_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_folder, "_VALUES_AT_ONCE", 100)
    save(make_llama(), tmp_path)
    files = SafetensorsFolder.of(tmp_path)
    with files.reading() as reader:
        for name, value in make_llama().state_dict().items():
            assert torch.equal(value.double(), reader.read(name, torch.float64)), name
            parts = [part.clone() for part in reader.parts(name)]
            assert torch.equal(value.flatten(), torch.cat(parts)), name


def test_stages_have_the_dtype_of_the_folder_unless_another_is_asked_for(tmp_path: Path) -> None:
    save(make_llama().bfloat16(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path)
    assert {torch.bfloat16} == {weight.dtype for weight in pretrained.model.parameters()}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None}))
    pretrained = penstock.load_pretrained(tmp_path)
    assert {torch.bfloat16} == {weight.dtype for weight in pretrained.model.parameters()}


def test_parameters_that_must_stay_in_32_bits_stay_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    save(make_llama(), tmp_path)
    whole = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.float32 == whole.model.norm.weight.dtype
    assert_filled_like(whole, fill_all(penstock.load_pretrained(tmp_path, dtype=torch.bfloat16)))


def test_model_with_a_head_loads_from_the_folder_of_its_body(tmp_path: Path) -> None:
    """Names in the folder lack the prefix that they have in the model."""
    save(make_gpt2_body(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path, model_class=GPT2LMHeadModel)
    assert_filled_like(GPT2LMHeadModel.from_pretrained(tmp_path), fill_all(pretrained))


def test_model_is_built_without_values_and_ready_to_train(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path, attention_dropout=0.25)
    model: Any = pretrained.model
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.training
    assert model.config.use_cache is False
    assert 0.25 == model.config.attention_dropout


def test_stage_reads_no_file_of_another_stage(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path)
    pieces = cut_in_two(pretrained)
    own = set(pieces.get_stage_module(1).state_dict())
    for file in tmp_path.glob("*.safetensors"):
        if not own & load_file(file).keys():
            file.unlink()
    pretrained.fill(pieces.get_stage_module(1), "cpu")
    with pytest.raises(PretrainedError, match=r"cannot be read from .* as its header described it"):
        pretrained.fill(pieces.get_stage_module(0), "cpu")


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    save(make_mixtral(), tmp_path)
    for module in fill_all(penstock.load_pretrained(tmp_path)):
        for name, weight in module.named_parameters():
            assert weight.nbytes == weight.untyped_storage().nbytes(), name


@pytest.mark.parametrize("make", [make_llama, lambda: make_llama(is_tied=True), make_gpt2])
def test_gradients_are_those_of_the_whole_model(tmp_path: Path, make: Callable[[], Any]) -> None:
    model = make()
    save(model.double(), tmp_path)
    tokens = make_tokens()

    def run_rank(group: penstock.LocalGroup) -> dict[str, Tensor]:
        pipe = penstock.parallelize(
            penstock.load_pretrained(tmp_path),
            tokens,
            loss_fn=next_token_loss,
            num_microbatches=4,
            group=group,
        )
        pipe.step(tokens, target=tokens)
        return {name: weight.grad for name, weight in pipe.named_parameters()}

    found: dict[str, Tensor] = {}
    for part in penstock.local_ranks(2, run_rank):
        found |= part
    whole = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for name, grad in grads_of_whole(whole).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)


def test_one_description_serves_several_pipelines(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path)
    tokens, shared = make_tokens(), cut_once(pretrained)

    def run_rank(group: penstock.LocalGroup) -> Tensor:
        options = shared if group.num_ranks == 2 else {}
        pipe = penstock.parallelize(
            pretrained, tokens, loss_fn=next_token_loss, num_microbatches=4, group=group, **options
        )
        return pipe.evaluate(tokens, target=tokens)

    losses = [*penstock.local_ranks(2, run_rank), *penstock.local_ranks(1, run_rank)]
    assert losses[0] == losses[1]
    torch.testing.assert_close(losses[0], losses[2])


# What is refused


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change what is in a folder's only file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def remove(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            del tensors[name]

        change_tensors(folder, change)

    return spoil


def add(name: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({name: value}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def write_config(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return spoil


def to_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            remove("model.norm.weight"),
            "does not hold the weights of a LlamaForCausalLM: it lacks model.norm.weight. Expected",
        ),
        (
            add("model.extra", torch.ones(2)),
            "it has model.extra, which the model does not have. Expected the same tensors: give",
        ),
        (
            add("model.norm.weight", torch.ones(3)),
            r"'model.norm.weight' has the shape \[3\] in .*, but \[16\] in a LlamaForCausalLM",
        ),
        (truncate, "model.safetensors is not a complete safetensors file .*Expected one: copy or"),
        (
            lambda folder: (folder / "model.safetensors").write_text("{}"),
            "model.safetensors is not a complete safetensors file",
        ),
        (to_bin, "has neither model.safetensors nor model.safetensors.index.json, but config.json"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "config.json cannot be read as JSON .*Expected a folder as save_pretrained",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            "config.json cannot be read as JSON .*Expected a folder as save_pretrained",
        ),
        (write_config(model_type="gpt-unknown"), "transformers cannot use .*config.json"),
        (
            write_config(architectures=["NoSuchModel"]),
            "names the architecture 'NoSuchModel', which transformers lacks. Give the class",
        ),
        (write_config(architectures=None), "names no architecture. Give the class of the model"),
        (write_config(quantization_config={"a": 1}), "holds quantized weights, which stages"),
        (
            add("model.layers.0.mlp.weights", torch.ones(2, dtype=torch.uint16)),
            "'model.layers.0.mlp.weights' in .* has the dtype U16. Expected one of BOOL",
        ),
    ],
)
def test_folder_that_is_not_right_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    save(make_llama(), tmp_path, num_bytes="1GB")
    spoil(tmp_path)
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    changed = change(index)
    file.write_text(json.dumps(index if changed is None else changed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index["weight_map"].update(x="model-9.safetensors"),
            "lists the file 'model-9.safetensors', which .* lacks. Expected all files of the index",
        ),
        (
            lambda index: index["weight_map"].update(x="model-00001-of-00006.safetensors"),
            "says that 'x' is in 'model-00001-of-00006.safetensors', but it is not",
        ),
        (lambda index: {"weights": {}}, "is not an index of weights .KeyError: 'weight_map'."),
        (lambda index: {"weight_map": {"x": "../x"}}, "names files outside of its folder"),
    ],
)
def test_index_that_is_not_right_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    save(make_llama(), tmp_path, num_bytes="6KB")
    change_index(tmp_path, change)
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 8}, "the configuration of .* has no hidden. Expected keyword arguments"),
        ({"dtype": torch.int8}, "dtype is torch.int8. Expected a floating dtype of torch"),
        ({"dtype": "bf16"}, "dtype is 'bf16'. Expected a floating dtype of torch"),
        ({"model_class": nn.Linear}, "model_class is <class 'torch.nn.*Expected a class of a mod"),
        ({"model_class": LlamaModel}, "it has lm_head.weight, which the model does not have"),
        ({"hidden_size": 32}, r"'lm_head.weight' has the shape \[64, 16\] in .*, but \[64, 32\]"),
    ],
)
def test_argument_that_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save(make_llama(), tmp_path)
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path, **options)


def test_name_of_the_hub_is_refused() -> None:
    with pytest.raises(PretrainedError, match="'org/model' is not a folder on this machine"):
        penstock.load_pretrained("org/model")


@pytest.mark.parametrize("package", ["transformers", "safetensors"])
def test_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    save(make_llama(), tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        PretrainedError, match=rf"needs .*{package}.*: pip install 'penstock\[hf\]'"
    ):
        penstock.load_pretrained(tmp_path)


def test_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    """transformers unties them with a warning; here that is said in the call."""
    save(make_llama(), tmp_path, num_bytes="1GB")
    message = "has different values for 'model.embed_tokens.weight' and 'lm_head.weight', which are"
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path, tie_word_embeddings=True)
    change_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    whole = LlamaForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=True)
    pretrained = penstock.load_pretrained(tmp_path, tie_word_embeddings=True)
    assert_filled_like(whole, fill_all(pretrained))


def test_tensor_that_is_in_files_twice_is_refused(tmp_path: Path) -> None:
    save(make_gpt2(), tmp_path, num_bytes="1GB")
    add("wte.weight", torch.ones(64, 16))(tmp_path)
    message = "has 'transformer.wte.weight' 2 times, as transformer.wte.weight, wte.weight"
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path)


def test_experts_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    save(make_mixtral(), tmp_path, num_bytes="1GB")
    name = next(name for name in load_file(tmp_path / "model.safetensors") if "experts.1" in name)
    add(name, torch.ones(3, 3))(tmp_path)
    with pytest.raises(PretrainedError, match="the conversion of transformers fails for "):
        penstock.load_pretrained(tmp_path)


def test_buffer_without_known_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_llama(), tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    monkeypatch.setattr(LlamaModel, "_init_weights", lambda self, module: None)
    pretrained = penstock.load_pretrained(tmp_path)
    message = "the buffer 'model.rotary_emb.inv_freq' of LlamaForCausalLM is neither in the files"
    with pytest.raises(PretrainedError, match=message):
        fill_all(pretrained)


def test_file_that_changed_is_refused(tmp_path: Path) -> None:
    save(make_llama(), tmp_path, num_bytes="1GB")
    pretrained = penstock.load_pretrained(tmp_path)
    pieces = cut_in_two(pretrained)
    file = tmp_path / "model.safetensors"
    os.utime(file, ns=(0, 0))  # Its length stays, as if weights had been saved again.
    with pytest.raises(PretrainedError, match=r"cannot be read from .* as its header"):
        pretrained.fill(pieces.get_stage_module(1), "cpu")
    add("model.norm.weight", torch.ones(3))(tmp_path)
    with pytest.raises(PretrainedError, match=r"cannot be read from .* as its header"):
        pretrained.fill(pieces.get_stage_module(1), "cpu")
