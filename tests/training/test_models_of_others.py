"""Models that Penstock does not know: of transformers, and of functions."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import DATA, PLAIN, losses, run

from penstock.comm import LocalGroup, local_ranks
from penstock.errors import OptionError
from penstock.training.choices import Data
from penstock.training.documents import Documents
from penstock.training.forecast import Forecast
from penstock.training.log_sinks import figures_of
from penstock.training.model_sources import HuggingFaceModel, ModelSource, OwnModel
from penstock.training.models import Place, spread
from penstock.training.orders import choose_orders
from penstock.training.token_loss import logits_of, next_token_loss

OWN = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Embedding(256, 16), *(nn.Linear(16, 16) for _ in range(4)), Head())

class Head(nn.Linear):
    def __init__(self):
        super().__init__(16, 256)

def spoilt():
    model = make()
    model[0].weight.data[ord("z")] = float("nan")
    return model

def nothing():
    return 5

def fails():
    raise ValueError("no such thing")

def hidden():
    return nn.Sequential(nn.Embedding(256, 16), *(nn.Flatten() for _ in range(4)))
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_models.py").write_text(OWN)
    return "own_models"


def on_ranks(model: ModelSource, num_ranks: int, **options: Any) -> list[float]:
    schedule = "ZB-H1" if num_ranks == 1 else "ZB-V"
    return losses(model=model, num_ranks=num_ranks, schedule=schedule, steps=3, **options)


def test_model_of_a_function_has_the_same_losses_on_any_number_of_ranks(own: str) -> None:
    model = OwnModel(f"{own}:make", 8)
    expected = on_ranks(model, 1)
    assert expected == on_ranks(model, 2)
    assert expected[-1] < expected[0]
    assert expected != on_ranks(model, 1, seed=1)


def test_random_model_of_a_config_has_the_same_losses_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    model = HuggingFaceModel(str(path), 8)
    assert on_ranks(model, 1, clip=1.0) == pytest.approx(on_ranks(model, 2, clip=1.0), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", r"own_models:nothing returned a int\. Expected a model"),
        ("fails", r"own_models:fails failed: ValueError: no such thing"),
        ("hidden", "returned a Tensor without logits for each token"),
        ("mak", r"own_models has no 'mak'\. Did you mean make\?"),
    ],
)
def test_function_that_gives_no_model_is_rejected(own: str, name: str, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        on_ranks(OwnModel(f"{own}:{name}", 8), 1)


def test_logits_are_found_in_what_models_return() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    target = torch.zeros(2, 3, dtype=torch.long)

    class Output:
        pass

    output = Output()
    output.logits = logits
    for returned in (logits, {"logits": logits}, output):
        assert logits is logits_of(returned)
    assert torch.float32 == next_token_loss(logits, target).dtype
    assert torch.float64 == next_token_loss(logits.double(), target).dtype
    with pytest.raises(OptionError, match="the model returned a dict without logits"):
        logits_of({"hidden": logits})


def test_cut_and_forecast_count_the_loss(tmp_path: Path) -> None:
    """The loss of many words costs as much as layers: the rank that computes it has fewer."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 1024}))
    config = replace(PLAIN, model=HuggingFaceModel(str(tmp_path), 8), schedule="1F1B", num_ranks=2)
    forecasts: list[Forecast] = []

    def main(group: LocalGroup) -> int:
        place = Place.of(config, group, torch.device("cpu"))
        pipe = spread(config, choose_orders(config), place, forecasts.append)
        return len({name.split(".")[2] for name, _ in pipe.named_parameters() if "layers" in name})

    first, last = local_ranks(2, main)
    assert (4, 0) == (first, last)  # Without the loss, 3 and 1.
    logits = 4.0 * 2 * 8 * 1024  # In 32 bits, of a microbatch of 2.
    assert all(2 * logits <= found.ranks[1].activations for found in forecasts)


def test_prompt_without_tokens_is_rejected(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}}
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, **words})
    )
    with pytest.raises(OptionError, match=r"--sample is ' ', which has no tokens\."):
        losses(sample=" ", tokenizer=str(path), num_ranks=1)


def test_tokens_that_a_rank_finds_too_few_are_rejected(tmp_path: Path) -> None:
    read = Data(Documents((), (DATA.documents.parts[0][:8],)))
    config = replace(PLAIN, num_ranks=1)
    with pytest.raises(OptionError, match="the data has no whole sequence to train on"):
        losses(read=read, num_ranks=config.num_ranks)


def test_steps_that_are_not_finite_are_skipped_and_named(own: str) -> None:
    """One sequence has a character whose embedding is NaN."""
    text = b"the quick brown fox jumps over the lady dog. " * 20
    read = Data(Documents((), (text[:400] + b"z" + text[401:],)))
    usual = {"num_ranks": 2, "schedule": "ZB-V", "steps": 13}
    model = OwnModel(f"{own}:spoilt", 8)
    done = run(read, model=model, skip_bad_steps=1, **usual).steps
    skipped = [one for one in done if one.skipped]
    assert 1 <= len(skipped) <= 2  # The character is in one sequence, or in two that overlap.
    for one in skipped:
        assert one.skipped.startswith(
            f"the loss of step {one.step} is not finite: nan appeared first in the forward of "
            "stage 0 (rank 0), microbatch "
        )
        assert one.skipped.endswith(", module 0")
        assert "loss" not in figures_of(one)
        assert 1 == figures_of(one)["skipped"]
    assert all(math.isfinite(one.loss) for one in done if not one.skipped)
    first = skipped[0].step
    expected = run(read, model=model, **{**usual, "steps": first - 1}).steps if first > 1 else ()
    assert [one.loss for one in expected] == [one.loss for one in done[: first - 1]]
    stopped = rf"the loss of step {first} is not finite: .* That is step 1 in a row that is not "
    with pytest.raises(OptionError, match=stopped):
        run(read, model=model, skip_bad_steps=0, **usual)
