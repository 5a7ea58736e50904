"""A model's own loss: microbatches count by the labels that it is the mean of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.errors import StageError
from penstock.runtime.own_loss import Counted

WORDS, ROWS, LENGTH, NUM_MICROBATCHES = 40, 8, 12, 4
SIZES = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTHS = {**SIZES, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
TRANSLATION = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}


def make(name: str, config: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    described = getattr(transformers, config)(pad_token_id=0, **options)
    described.use_cache = False
    model: nn.Module = getattr(transformers, name)(described)
    return model.double().eval()  # Without dropout.


def make_t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return make(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=WORDS,
        decoder_start_token_id=0,
        **sizes,
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Counted]] = {
    "llama": (
        lambda: make("LlamaForCausalLM", "LlamaConfig", **WIDTHS, num_key_value_heads=2),
        Counted.ALL_BUT_FIRST,
    ),
    "bert, causal": (
        lambda: make("BertLMHeadModel", "BertConfig", **WIDTHS, is_decoder=True),
        Counted.ALL_BUT_FIRST,
    ),
    "bert, masked": (lambda: make("BertForMaskedLM", "BertConfig", **WIDTHS), Counted.ALL),
    "bert, tokens": (
        lambda: make("BertForTokenClassification", "BertConfig", **WIDTHS, num_labels=WORDS),
        Counted.ALL,
    ),
    # Named like those that leave out first labels, but it counts them.
    "bart, causal": (lambda: make("BartForCausalLM", "BartConfig", **TRANSLATION), Counted.ALL),
    "t5": (make_t5, Counted.ALL),
}


def make_batch() -> dict[str, Tensor]:
    """Tokens with labels, of which each row has another number; one microbatch has none."""
    torch.manual_seed(1)
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, LENGTH - 1 - row :] = -100
    labels[:2] = -100
    labels[4, 0] = -100
    labels[6, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def grads_of(named: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in named if p.grad is not None}


def assert_close(expected: Any, actual: Any) -> None:
    """transformers computes some of these losses in 32 bits, whatever the model's dtype."""
    torch.testing.assert_close(actual, expected, rtol=1.3e-6, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_batch_whatever_labels_count(name: str) -> None:
    """Microbatches counted alike, whatever their labels, so gradients differed from the batch's."""
    make_model, counted = MODELS[name]
    batch = make_batch()
    whole = make_model()
    loss = whole(**batch).loss
    loss.backward()
    grads = grads_of(whole.named_parameters(remove_duplicate=False))

    def main(group: penstock.LocalGroup) -> None:
        pipe = penstock.parallelize(
            make_model(), batch, loss_fn="model", num_microbatches=NUM_MICROBATCHES, group=group
        )
        assert_close(loss.detach(), pipe.evaluate(**batch))
        for _ in range(2):  # What was found in the first step is used in the second.
            pipe.zero_grad()
            assert_close(loss.detach(), pipe.step(**batch))
            own = grads_of(pipe.named_parameters())
            assert own
            assert_close({name: grads[name] for name in own}, own)
        if pipe.pipeline.stages.keys() & {3}:
            assert counted is pipe.loss_fn.counted  # type: ignore[union-attr]

    penstock.local_ranks(2, main)


def test_labels_are_counted_without_a_look_at_the_loss_if_shares_are_the_same() -> None:
    batch = make_batch()
    batch["labels"] = batch["input_ids"]

    def main(group: penstock.LocalGroup) -> object:
        pipe = penstock.parallelize(
            MODELS["llama"][0](), batch, loss_fn="model", num_microbatches=4, group=group
        )
        pipe.step(**batch)
        return pipe.loss_fn.counted  # type: ignore[union-attr]

    assert [None] == penstock.local_ranks(1, main)


def test_loss_that_is_not_the_mean_over_labels_is_refused_if_their_numbers_differ() -> None:
    """The loss of its routers is a mean over tokens, which no weights can join to the batch's."""
    batch = make_batch()
    options = {"num_key_value_heads": 2, "num_local_experts": 3, "output_router_logits": True}

    def main(group: penstock.LocalGroup) -> None:
        model = make(
            "MixtralForCausalLM",
            "MixtralConfig",
            **WIDTHS,
            **options,
            experts_implementation="batched_mm",
        )
        pipe = penstock.parallelize(
            model, batch, loss_fn="model", num_microbatches=NUM_MICROBATCHES, group=group
        )
        pipe.step(**batch)

    message = (
        r"(?s)microbatches have different numbers of labels, and it is not known which of them the "
        r"model's own loss is the mean of: it is [0-9.]+, and the cross-entropy of the logits is "
        r"[0-9.]+ over all labels, [0-9.]+ over all labels but the first of each row\. Expected "
        r".*, or a loss_weight"
    )
    with pytest.raises(StageError, match=message):
        penstock.local_ranks(1, main)


def test_caller_may_say_how_much_microbatches_count() -> None:
    batch = make_batch()
    whole = MODELS["llama"][0]()
    loss = whole(**batch).loss.detach()

    def main(group: penstock.LocalGroup) -> Tensor:
        pipe = penstock.parallelize(
            MODELS["llama"][0](),
            batch,
            loss_fn="model",
            loss_weight=lambda labels: (labels[:, 1:] != -100).sum(),
            num_microbatches=NUM_MICROBATCHES,
            group=group,
        )
        found: Tensor = pipe.step(**batch, target=batch["labels"])
        return found

    (found,) = penstock.local_ranks(1, main)
    assert_close(loss, found)
