"""Models that nobody here wrote, in small: their configs, batches, and where to cut them.

`cut_and_train` is what each rank runs in a worker of `worker_pool`, and `train_stages` what it runs
with `penstock.local_ranks`, where all ranks share one traced model.
"""

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import penstock
from limits import HANG_S
from penstock import (
    Balanced,
    Pipe,
    Pipeline,
    PipelineStage,
    Replicate,
    SplitPoint,
    TensorChunkSpec,
    schedules,
)
from stage_training import ATOL, CPU, RTOL, Group, rank_in, split
from staged_models import Batch, StepRecord

os.environ["HF_HUB_OFFLINE"] = "1"  # Before transformers is loaded, which is late: it is slow.

VOCABULARY, WIDTH, LENGTH, HEADS, LAYERS = 29, 8, 6, 2, 4
NUM_MICROBATCHES = 4
BATCH_SIZE = 2 * NUM_MICROBATCHES
SPREAD = 0.3  # Of the first weights: so large that every layer matters.
NO_TOKEN = -100  # A label that transformers leaves out of the loss.


class RealModel(NamedTuple):
    """How to build a model, a batch for it, its loss, and four stages to cut it into."""

    make: Callable[..., nn.Module]
    """Takes a dropout rate, and for models of transformers how attention is computed."""
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[Any, Any], Tensor]
    starts: tuple[str, str, str]
    """The modules with which stages begin; that in the middle if there are two stages."""
    replicated: tuple[str, ...] = ()
    """The keyword arguments that every microbatch takes whole."""

    def build(self, dropout: float = 0.0, **options: Any) -> nn.Module:
        """The same model with the same parameters, whoever builds it."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make(dropout, **options).double().train()

    def batch(self) -> Batch:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.make_batch()

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Its parts; not cut by Penstock, so that they can be compared with what it cuts."""
        cut, whole = {}, {}
        for name, value in batch.kwargs.items():
            is_cut = isinstance(value, Tensor) and name not in self.replicated
            (cut if is_cut else whole)[name] = value
        target = () if batch.target is None else batch.target
        parts = split((batch.args, cut, target), NUM_MICROBATCHES)
        return [Batch(args, {**kwargs, **whole}, target) for args, kwargs, target in parts]

    def in_tuples(self) -> "RealModel":
        """For a model that computes its loss itself: let it return tuples."""

        def make_batch() -> Batch:
            args, kwargs, target = self.make_batch()
            return Batch(args, {**kwargs, "return_dict": False}, target)

        assert self.loss_fn is own_loss
        return self._replace(make_batch=make_batch, loss_fn=own_loss_in_tuple)

    def kwargs_chunk_spec(self, batch: Batch) -> dict[str, Any]:
        return {
            name: Replicate() if name in self.replicated else TensorChunkSpec(0)
            for name in batch.kwargs
        }


def _gpt2(dropout: float, **options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": LENGTH}
    sizes["initializer_range"] = SPREAD
    return GPT2LMHeadModel(GPT2Config(**_tokens(), **sizes, **rates, **options))


def _llama(dropout: float, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**_sizes(), "num_key_value_heads": 1}
    config = LlamaConfig(**_tokens(), **sizes, attention_dropout=dropout, **options)
    return LlamaForCausalLM(config)


def _mixtral(dropout: float, **options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**_sizes(), "num_key_value_heads": 1, "num_local_experts": 3}
    options = {"experts_implementation": "batched_mm", **options}
    config = MixtralConfig(**_tokens(), **sizes, attention_dropout=dropout, **options)
    return MixtralForCausalLM(config)


def _bert(dropout: float, **options: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_tokens(), **_sizes(), **_dropouts(dropout), **options))


def _vit(dropout: float, **options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {**_sizes(), "image_size": 8, "patch_size": 4, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, **_dropouts(dropout), **options))


def _t5(dropout: float, **options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 2 * WIDTH, "num_heads": HEADS}
    config = T5Config(
        **_tokens(),
        **sizes,
        num_layers=LAYERS // 2,
        decoder_start_token_id=0,
        dropout_rate=dropout,
        **options,
    )
    return T5ForConditionalGeneration(config)


def _torch_transformer(dropout: float) -> nn.Module:
    half = LAYERS // 2
    return nn.Transformer(WIDTH, HEADS, half, half, 2 * WIDTH, dropout, batch_first=True)


def _tokens() -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _sizes() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "initializer_range": SPREAD,
    }


def _dropouts(rate: float) -> dict[str, float]:
    return dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), rate)


def _causal_batch() -> Batch:
    ids = some_tokens()
    return Batch((), {"input_ids": ids, "labels": some_left_out(ids), "use_cache": False}, None)


def _masked_batch() -> Batch:
    ids = some_tokens()
    mask = some_mask()
    kwargs = {"input_ids": ids, "attention_mask": mask, "labels": some_left_out(some_tokens())}
    return Batch((), kwargs, None)


def _translation_batch() -> Batch:
    kwargs = {
        "input_ids": some_tokens(),
        "attention_mask": some_mask(),
        "labels": some_left_out(some_tokens()[:, :-1]),
        "use_cache": False,
    }
    return Batch((), kwargs, None)


def _experts_batch() -> Batch:
    return Batch((), {"input_ids": some_tokens(), "use_cache": False}, some_tokens())


def _image_batch() -> Batch:
    images = torch.randn(BATCH_SIZE, 3, 8, 8, dtype=torch.float64)
    return Batch((), {"pixel_values": images}, torch.randint(3, (BATCH_SIZE,)))


def _vector_batch() -> Batch:
    source = torch.randn(BATCH_SIZE, LENGTH, WIDTH, dtype=torch.float64)
    target = torch.randn(BATCH_SIZE, LENGTH - 1, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1, dtype=torch.float64)
    kwargs = {
        "tgt_mask": mask,
        "tgt_is_causal": True,
        "src_key_padding_mask": some_mask() == 0,
    }
    return Batch((source, target), kwargs, torch.randn_like(target))


def some_tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH_SIZE, LENGTH))


def some_mask() -> Tensor:
    """Nothing is masked in the first microbatch, with which models are traced, but in others."""
    lengths = torch.tensor([LENGTH, LENGTH, *(LENGTH - 1 - i % 4 for i in range(BATCH_SIZE - 2))])
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def some_left_out(labels: Tensor) -> Tensor:
    """Each microbatch leaves out another number of labels."""
    left_out = torch.rand(labels.shape) < torch.linspace(0, 0.5, BATCH_SIZE)[:, None]
    return labels.masked_fill(left_out, NO_TOKEN)


def own_loss(output: Any, _: Any) -> Tensor:
    """What a model of transformers computes from its labels."""
    loss: Tensor = output.loss
    return loss


def own_loss_in_tuple(output: Any, _: Any) -> Tensor:
    """The same with `return_dict=False`."""
    loss: Tensor = output[0]
    return loss


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def _starts(layers: str) -> tuple[str, str, str]:
    return f"{layers}.1", f"{layers}.2", f"{layers}.3"


REAL_MODELS = {
    "gpt2": RealModel(_gpt2, _causal_batch, own_loss, _starts("transformer.h")),
    "llama": RealModel(_llama, _causal_batch, own_loss, _starts("model.layers")),
    "bert": RealModel(_bert, _masked_batch, own_loss, _starts("bert.encoder.layer")),
    "t5": RealModel(
        _t5,
        _translation_batch,
        own_loss,
        ("encoder.block.1", "decoder.block.0", "decoder.block.1"),
    ),
    "mixtral": RealModel(_mixtral, _experts_batch, cross_entropy, _starts("model.layers")),
    "vit": RealModel(_vit, _image_batch, cross_entropy, _starts("vit.layers")),
    "torch_transformer": RealModel(
        _torch_transformer,
        _vector_batch,
        functional.mse_loss,
        ("encoder.layers.1", "decoder.layers.0", "decoder.layers.1"),
        replicated=("tgt_mask",),
    ),
}


class StageBuilder(Protocol):
    """A pipe, or what makes stages without one."""

    def build_stage(self, stage_index: int, device: torch.device, group: Any) -> PipelineStage: ...


def cut_real(model: RealModel, module: nn.Module, cut: str, batch: Batch | None = None) -> Pipe:
    """Trace a model and cut it; `cut` is "names" or "balanced", and the number of stages."""
    way, num_stages = cut.split()
    example = model.microbatches(batch or model.batch())[0]
    if way == "balanced":
        return penstock.cut(
            module, example.args, example.kwargs, split_policy=Balanced(int(num_stages))
        )
    starts = model.starts if num_stages == "4" else model.starts[1:2]
    spec = dict.fromkeys(starts, SplitPoint.BEGINNING)
    return penstock.cut(module, example.args, example.kwargs, split_spec=spec)


def train_stages(
    group: Group,
    pipe: StageBuilder,
    model: RealModel,
    batch: Batch,
    schedule_name: str,
) -> StepRecord:
    """One rank's share of one step; its gradients are by the names in the whole model."""
    schedule = schedules.get(schedule_name)(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    held = schedule.placement.stages_of(rank_in(group))
    stages = [pipe.build_stage(index, CPU, group) for index in held]
    pipeline = Pipeline(
        stages,
        schedule,
        loss_fn=model.loss_fn,
        kwargs_chunk_spec=model.kwargs_chunk_spec(batch),
        timeout=HANG_S,
    )
    for stage in stages:
        stage.submod.zero_grad()
    losses: list[Tensor] = []
    outputs = pipeline.step(*batch.args, target=batch.target, losses=losses, **batch.kwargs)
    grads = {
        f"{stage.stage_index} {name}": None if p.grad is None else p.grad.clone()
        for stage in stages
        for name, p in stage.submod.named_parameters(remove_duplicate=False)
    }
    return StepRecord(outputs, losses, grads)


def cut_and_train(group: Group, name: str, cut: str, schedule_name: str) -> StepRecord:
    """As `train_stages`, for a rank that has the model to itself."""
    model = REAL_MODELS[name]
    pipe = cut_real(model, model.build(), cut)
    return train_stages(group, pipe, model, model.batch(), schedule_name)


def train_whole(model: RealModel, module: nn.Module, batch: Batch) -> StepRecord:
    """The step of a model that is not cut, microbatch by microbatch."""
    module = deepcopy(module)
    module.zero_grad()
    outputs, losses = [], []
    for args, kwargs, target in model.microbatches(batch):
        outputs.append(module(*args, **kwargs))
        losses.append(model.loss_fn(outputs[-1], target))
        (losses[-1] / NUM_MICROBATCHES).backward()
    grads = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    return StepRecord(_joined(outputs), [loss.detach() for loss in losses], grads)


def _joined(outputs: Sequence[Any]) -> Any:
    def join(*parts: Tensor) -> Tensor:
        values = [part.detach() for part in parts]
        return torch.cat(values) if values[0].dim() else torch.stack(values)

    return pytree.tree_map(join, *outputs)


def assert_like_whole(
    expected: StepRecord,
    ranks: Sequence[StepRecord],
    *,
    rtol: float = RTOL,
    atol: float = ATOL,
) -> None:
    """Raises unless a step gave the outputs, losses and gradients of the whole model.

    A parameter that several stages hold must have its whole gradient in each of them.
    """

    def check(place: str, wanted: Any, actual: Any) -> None:
        torch.testing.assert_close(
            actual, wanted, rtol=rtol, atol=atol, msg=lambda message: f"{place}: {message}"
        )

    (last,) = (record for record in ranks if record.outputs is not None)
    assert type(expected.outputs) is type(last.outputs)
    check("outputs", expected.outputs, last.outputs)
    check("losses", expected.losses, last.losses)
    found = [(*key.split(), grad) for record in ranks for key, grad in record.grads.items()]
    assert set(expected.grads) == {name for _, name, _ in found}
    for stage, name, grad in found:
        check(f"gradient of {name} in stage {stage}", expected.grads[name], grad)


def holds_all_of(module: nn.Module, pipe: Pipe) -> bool:
    """Whether the stages' state dicts together have the keys of the model's."""
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    return set(module.state_dict()) == {key for stage in stages for key in stage.state_dict()}
