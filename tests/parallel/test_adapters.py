"""LoRA adapters: only they are trained, and PEFT loads what was saved, equal to the bit."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import penstock
from penstock.backward import stage_backward_input, stage_backward_weight
from penstock.errors import PretrainedError
from penstock.parallel import Pretrained
from penstock.parallel.saved_folder import SavedModel, write_pretrained
from pretrained_folders import (
    cut_in_two,
    cut_once,
    grads_of_whole,
    make_gpt2,
    make_llama,
    make_tokens,
    next_token_loss,
    save,
)

# PEFT warns of what it does for these models, which is right.
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

TARGETS = ["q_proj", "v_proj"]


def make_config(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": TARGETS, **options})


def load_whole(folder: Path, adapter: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def train_on_two(
    make: Callable[[], Pretrained | nn.Module],
    folder: Path,
    num_steps: int,
    *,
    is_cut_by_each: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train adapters and save them; return the gradients of a last step, and the state."""
    tokens = make_tokens()
    shared = make()
    options = {} if is_cut_by_each else cut_once(shared)

    def run_rank(group: penstock.LocalGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        pipe = penstock.parallelize(
            make() if is_cut_by_each else shared,
            tokens,
            loss_fn=next_token_loss,
            num_microbatches=4,
            group=group,
            **options,
        )
        trained = [weight for weight in pipe.parameters() if weight.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        for _ in range(num_steps):
            pipe.step(tokens, target=tokens)
            optimizer.step()
            optimizer.zero_grad()
        pipe.save_pretrained(folder)
        pipe.step(tokens, target=tokens)
        named = dict(pipe.named_parameters())
        assert all(weight.requires_grad == (weight.grad is not None) for weight in named.values())
        grads = {name: w.grad for name, w in named.items() if w.grad is not None}
        return grads, pipe.state_dict()

    grads: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for own_grads, own_state in penstock.local_ranks(2, run_rank):
        grads |= own_grads
        state |= own_state
    return grads, state


@pytest.mark.parametrize(
    ("make", "options", "is_cut_by_each"),
    [
        (make_llama, {}, True),
        (make_llama, {"target_modules": [*TARGETS, "embed_tokens"], "r": 3}, False),
        (make_llama, {"modules_to_save": ["lm_head"], "init_lora_weights": "gaussian"}, False),
        (lambda: make_llama(is_tied=True), {}, False),
        (lambda: make_llama(is_tied=True), {"modules_to_save": ["lm_head"]}, True),
        (
            lambda: make_llama(is_tied=True),
            {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            False,
        ),
        (make_gpt2, {"target_modules": ["c_attn"]}, True),
    ],
    ids=["llama", "embedding", "trained head", "tied", "tied head", "tied and trained", "gpt2"],
)
def test_adapters_are_trained_and_saved_as_with_the_whole_model(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, Any], is_cut_by_each: bool
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save(make().double(), base)
    config = make_config(**options)
    grads, state = train_on_two(
        lambda: penstock.load_pretrained(base).with_adapter(config),
        adapter,
        num_steps=1,
        is_cut_by_each=is_cut_by_each,
    )
    whole = load_whole(base, adapter)
    expected = whole.state_dict()
    assert expected.keys() == state.keys()
    for name, value in expected.items():
        assert value.dtype == state[name].dtype, name
        assert torch.equal(value, state[name]), name
    expected_grads = grads_of_whole(whole)
    assert expected_grads.keys() <= grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12)

    whole.save_pretrained(tmp_path / "by PEFT")
    file = "adapter_model.safetensors"
    own, theirs = load_file(adapter / file), load_file(tmp_path / "by PEFT" / file)
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[name], own[name]) for name in own)


def test_saved_adapter_is_trained_on(tmp_path: Path) -> None:
    base, first, second = tmp_path / "base", tmp_path / "first", tmp_path / "second"
    save(make_llama().double(), base)
    config = make_config()
    train_on_two(lambda: penstock.load_pretrained(base).with_adapter(config), first, num_steps=1)
    train_on_two(lambda: penstock.load_pretrained(base).with_adapter(first), second, num_steps=1)
    both = tmp_path / "both"
    train_on_two(lambda: penstock.load_pretrained(base).with_adapter(config), both, num_steps=2)
    expected, actual = (load_file(each / "adapter_model.safetensors") for each in (both, second))
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


def test_model_of_peft_with_all_its_values_is_trained_and_saved(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = make_llama(use_cache=False).double()
    save(model, base)
    torch.manual_seed(0)
    whole = get_peft_model(make_llama(use_cache=False).double(), make_config())

    def make() -> nn.Module:
        model = get_peft_model(make_llama(use_cache=False).double(), make_config())
        model.load_state_dict(whole.state_dict())
        return model.train()

    grads, state = train_on_two(make, adapter, num_steps=0)
    for name, grad in grads_of_whole(whole).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12)
    loaded = load_whole(base, adapter).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.items())


def test_new_weights_do_not_depend_on_the_cut_and_follow_the_seed(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    config = make_config()
    filled = []
    for seed in (0, 0, 1):
        pretrained = penstock.load_pretrained(tmp_path).with_adapter(config, seed=seed)
        model = pretrained.new_model()
        pretrained.fill(model, "cpu")
        filled.append({name: w for name, w in model.named_parameters() if w.requires_grad})
    first, again, other = filled
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert ("lora_B" in name) == torch.equal(weight, other[name])
        assert ("lora_B" in name) == (not weight.any())
    matrices = [weight for name, weight in first.items() if "lora_A" in name]
    assert not torch.equal(matrices[0], matrices[1])
    bound = matrices[0].shape[1] ** -0.5  # As nn.Linear begins.
    assert 0.5 * bound < max(weight.abs().max().item() for weight in matrices) <= bound


class CountProducts(TorchDispatchMode):
    """Counts the products of matrices that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.shapes.append(list(result.shape))
        return result


def test_weight_backward_computes_the_adapters_products_and_no_others(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path).with_adapter(make_config())
    pieces = cut_in_two(pretrained)
    module = pieces.get_stage_module(1)
    buffers = pretrained.fill(module, "cpu")

    def run_rank(group: penstock.LocalGroup) -> nn.Module:
        return pieces.build_stage(group.rank + 1, "cpu", group, buffers=buffers).submod

    (module,) = penstock.local_ranks(1, run_rank)
    hidden = torch.randn(2, 6, 16, requires_grad=True)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    output = module(hidden).logits
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [hidden], iter(trained))
    with CountProducts() as counted:
        stage_backward_weight(iter(trained), groups)
    assert sorted(list(weight.shape) for weight in trained) == sorted(counted.shapes)
    assert all(weight.grad is not None for weight in trained)
    frozen = [weight for weight in module.parameters() if not weight.requires_grad]
    assert all(weight.grad is None for weight in frozen)


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            IA3Config(target_modules=TARGETS, feedforward_modules=[]),
            r"adapter is a IA3Config. Expected a peft.LoraConfig, or a folder that PEFT has saved",
        ),
        (
            make_config(init_lora_weights="pissa"),
            "init_lora_weights is 'pissa', which needs the values of the whole model or is random",
        ),
        (
            make_config(use_dora=True),
            r"the values that '.*lora_magnitude_vector.*' begins with are not known here. Expected",
        ),
    ],
)
def test_adapter_that_needs_more_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    save(make_llama(), tmp_path)
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(tmp_path).with_adapter(config)


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_are_tied_to_each_other_are_refused(tmp_path: Path) -> None:
    save(make_llama(is_tied=True), tmp_path)
    config = make_config(target_modules=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(PretrainedError, match=r"ensure_weight_tying is set, and '.*', which gets"):
        penstock.load_pretrained(tmp_path).with_adapter(config)


def test_second_adapter_is_refused(tmp_path: Path) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path).with_adapter(make_config())
    with pytest.raises(PretrainedError, match=r"this model has an adapter already. Expected one"):
        pretrained.with_adapter(make_config())


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_llama(), tmp_path)
    pretrained = penstock.load_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        PretrainedError, match=r"A LoRA adapter needs peft: pip install 'penstock\["
    ):
        pretrained.with_adapter(make_config())


def test_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    save(make_llama(), tmp_path / "base")
    with pytest.raises(PretrainedError, match="has no adapter that PEFT can read"):
        penstock.load_pretrained(tmp_path / "base").with_adapter(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(name), r"does not hold this adapter: it lacks base_model\.model"),
        (
            lambda t, name: t.update(x=torch.ones(1)),
            "it has x, which the model does not have. Expected",
        ),
        (
            lambda t, name: t.update({name: torch.ones(2, 3)}),
            r"lora_A.weight' has the shape \[2, 3\] in .*, but \[2, 16\] in this model. Expected",
        ),
    ],
)
def test_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor], str], Any], message: str
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save(make_llama(), base)
    get_peft_model(make_llama(), make_config()).save_pretrained(adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors, next(name for name in tensors if "lora_A" in name))
    save_file(tensors, file)
    with pytest.raises(PretrainedError, match=message):
        penstock.load_pretrained(base).with_adapter(adapter)


def write_alone(folder: Path, model: Any) -> None:
    saved = SavedModel.of(model)
    assert saved is not None
    state = dict(model.state_dict())
    write_pretrained(folder, saved, {0: state}, gather=lambda v, what: [v], is_first=True)


def test_several_adapters_are_not_saved(tmp_path: Path) -> None:
    model = get_peft_model(make_llama(), make_config())
    model.add_adapter("other", make_config())
    with pytest.raises(PretrainedError, match=r"the model has the adapters default, other. Expect"):
        write_alone(tmp_path / "adapter", model)


def test_adapter_of_another_kind_of_lora_is_loaded_from_its_folder(tmp_path: Path) -> None:
    """What a DoRA adapter begins with is computed from the weights, so only a folder has it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save(make_llama(), base)
    get_peft_model(make_llama(), make_config(use_dora=True)).save_pretrained(adapter)
    pretrained = penstock.load_pretrained(base).with_adapter(adapter)
    model: Any = pretrained.new_model()
    pretrained.fill(model, "cpu")
    whole = load_whole(base, adapter)
    assert whole.state_dict().keys() == model.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    tokens = make_tokens()
    torch.testing.assert_close(whole.train()(tokens).logits, model.train()(tokens).logits)
