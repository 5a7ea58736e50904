"""Models of transformers and torch that are cut without tracing train as they do whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from fuzzing import rotated
from penstock import PipelineStage
from real_models import (
    BATCH_SIZE,
    HEADS,
    LAYERS,
    LENGTH,
    REAL_MODELS,
    WIDTH,
    RealModel,
    assert_like_whole,
    cross_entropy,
    holds_all_of,
    some_mask,
    some_tokens,
    train_stages,
    train_whole,
)
from stage_training import Group
from staged_models import Batch, StepRecord

SCHEDULES = {"1F1B": (2, "1F1B"), "ZBV": (4, "ZBV")}
both_schedules = pytest.mark.parametrize(
    ("num_stages", "schedule"), SCHEDULES.values(), ids=SCHEDULES
)
NOT_CUT = ("", "", "")


def vectors(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH_SIZE, length, WIDTH, dtype=torch.float64)


@rotated(cut=SCHEDULES, is_balanced=[False, True])
def test_encoder_cut_between_its_layers_trains_as_whole(
    cut: tuple[int, str], is_balanced: bool
) -> None:
    num_stages, schedule = cut
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(WIDTH)
    encoder = nn.TransformerEncoder(layer, LAYERS, norm).double()
    batch = Batch((vectors(),), {"src_key_padding_mask": some_mask() == 0}, vectors())
    model = RealModel(nn.Identity, lambda: batch, functional.mse_loss, NOT_CUT)
    example = model.microbatches(batch)[0]
    options = {"mb_args": example.args, "mb_kwargs": example.kwargs} if is_balanced else {}
    pipe = penstock.cut_between_modules(encoder, num_stages, layers=["layers", "norm"], **options)
    assert holds_all_of(encoder, pipe)
    ranks = penstock.local_ranks(2, train_stages, pipe, model, batch, schedule)
    assert_like_whole(train_whole(model, encoder, batch), ranks)


@both_schedules
def test_decoder_cut_between_its_layers_trains_as_whole(num_stages: int, schedule: str) -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoder(layer, LAYERS).double()
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    kwargs = {"memory": vectors(LENGTH + 1), "tgt_mask": mask}
    batch = Batch((vectors(),), kwargs, vectors())
    model = RealModel(nn.Identity, lambda: batch, functional.mse_loss, NOT_CUT, ("tgt_mask",))
    pipe = penstock.cut_between_modules(decoder, num_stages, layers=["layers"])
    assert holds_all_of(decoder, pipe)
    ranks = penstock.local_ranks(2, train_stages, pipe, model, batch, schedule)
    assert_like_whole(train_whole(model, decoder, batch), ranks)


def loss_of_logits(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def whole_llama_step(llama: nn.Module, ids: Tensor, target: Tensor, **kwargs: Any) -> StepRecord:
    """Of the model as it is; its outputs are the logits."""
    batch = Batch((), {"input_ids": ids, "use_cache": False, **kwargs}, target)
    model = REAL_MODELS["llama"]._replace(loss_fn=cross_entropy)
    record = train_whole(model, llama, batch)
    record.outputs = record.outputs.logits
    return record


@both_schedules
def test_llama_cut_between_its_modules_trains_as_whole(num_stages: int, schedule: str) -> None:
    llama = REAL_MODELS["llama"].build()
    ids, target = some_tokens(), some_tokens()
    # What every layer takes beside the hidden state: a step gives it on every rank.
    positions = torch.arange(LENGTH)[None]
    rotary = llama.model.rotary_emb(torch.empty(0, dtype=torch.float64), positions)
    batch = Batch((ids,), {"position_embeddings": rotary}, target)
    pipe = penstock.cut_between_modules(
        llama,
        num_stages,
        layers=["model.embed_tokens", "model.layers", "model.norm", "lm_head"],
        mb_args=(ids[:2],),
        mb_kwargs=batch.kwargs,
    )
    assert holds_all_of(llama, pipe)
    model = REAL_MODELS["llama"]._replace(
        loss_fn=loss_of_logits, replicated=("position_embeddings",)
    )
    ranks = penstock.local_ranks(2, train_stages, pipe, model, batch, schedule)
    assert_like_whole(whole_llama_step(llama, ids, target), ranks)


class Skip(nn.Module):
    """In place of what another stage does."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def llama_stage_class() -> type[nn.Module]:
    from transformers import LlamaForCausalLM

    class LlamaStage(LlamaForCausalLM):
        """Some layers of a Llama; parameters have the names that they have in the whole model."""

        _keys_to_ignore_on_load_unexpected = (".*",)  # The other stages'.

        def __init__(self, config: Any, layers: range) -> None:
            super().__init__(config)
            self.is_first = layers.start == 0
            for index in range(config.num_hidden_layers):
                if index not in layers:
                    self.model.layers[index] = Skip()
            if not self.is_first:
                self.model.embed_tokens = None
            if layers.stop < config.num_hidden_layers:
                self.model.norm, self.lm_head = Skip(), Skip()

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            inputs = {"input_ids" if self.is_first else "inputs_embeds": x}
            outputs = super().forward(**inputs, attention_mask=attention_mask, use_cache=False)
            return outputs.logits

    return LlamaStage


class SavedLlama:
    """The stages of a saved Llama: each takes from the file what it has itself."""

    def __init__(self, folder: Path, num_stages: int, *, is_checkpointed: bool) -> None:
        # Not by the ranks: to load a model is not safe in several threads at once.
        stage_class = llama_stage_class()
        size = LAYERS // num_stages
        self.modules = [
            stage_class.from_pretrained(
                folder, layers=range(start, start + size), dtype=torch.float64
            ).train()
            for start in range(0, LAYERS, size)
        ]
        for module in self.modules if is_checkpointed else ():
            module.gradient_checkpointing_enable()

    def build_stage(self, stage_index: int, device: torch.device, group: Group) -> PipelineStage:
        module = self.modules[stage_index]
        return PipelineStage(module, stage_index, len(self.modules), device, group=group)


@rotated(cut=SCHEDULES, is_checkpointed=[False, True])
def test_llama_cut_by_a_stage_class_trains_as_whole(
    cut: tuple[int, str], is_checkpointed: bool, tmp_path: Path
) -> None:
    num_stages, schedule = cut
    llama = REAL_MODELS["llama"].build()
    llama.save_pretrained(tmp_path)
    ids, target = some_tokens(), some_tokens()
    kwargs = {"attention_mask": some_mask()}
    batch = Batch((ids,), kwargs, target)
    model = REAL_MODELS["llama"]._replace(loss_fn=loss_of_logits)
    stages = SavedLlama(tmp_path, num_stages, is_checkpointed=is_checkpointed)
    keys = {key for module in stages.modules for key in module.state_dict()}
    assert set(llama.state_dict()) == keys
    ranks = penstock.local_ranks(2, train_stages, stages, model, batch, schedule)
    assert_like_whole(whole_llama_step(llama, ids, target, **kwargs), ranks)
