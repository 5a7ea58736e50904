"""Options of real models, and what tracing makes of them.

How attention and experts are computed, masks, checkpointing, dropout, caches.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from fuzzing import IS_LONG, only_in_fuzz, rotated
from limits import HANG_S
from penstock import Balanced, Pipeline
from penstock.comm import LocalGroup
from penstock.errors import CostError, TraceError
from real_models import (
    NUM_MICROBATCHES,
    REAL_MODELS,
    RealModel,
    assert_like_whole,
    cut_real,
    own_loss,
    some_mask,
    train_stages,
    train_whole,
)
from stage_training import CPU, assert_close
from staged_models import Batch

# Products of float32 have 24 bits, and are added in another order: some hundred of them.
FLOAT32_TOLERANCE = 2**-24 * 100


def with_kwargs(model: RealModel, **kwargs: Any) -> RealModel:
    """The same model, called with more keyword arguments."""

    def make_batch() -> Batch:
        batch = model.make_batch()
        return batch._replace(kwargs={**batch.kwargs, **kwargs})

    return model._replace(make_batch=make_batch)


def check(model: RealModel, module: nn.Module, cut: str, schedule: str, **tolerance: float) -> None:
    batch = model.batch()
    pipe = cut_real(model, module, cut, batch)
    ranks = penstock.local_ranks(2, train_stages, pipe, model, batch, schedule)
    assert_like_whole(train_whole(model, module, batch), ranks, **tolerance)


@rotated(name=["llama", *(["gpt2"] * IS_LONG)], attention=["sdpa", *(["eager"] * IS_LONG)])
def test_causal_model_with_padding_trains_as_whole(name: str, attention: str) -> None:
    model = with_kwargs(REAL_MODELS[name], attention_mask=some_mask())
    check(model, model.build(attn_implementation=attention), "balanced 4", "ZBV")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["gpt2", "llama"] if IS_LONG else ["gpt2"])
def test_checkpointed_model_trains_as_whole(name: str) -> None:
    model = REAL_MODELS[name]
    module = model.build()
    module.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="checkpoints activations, but a trace does not keep that"):
        check(model, module, "names 2", "1F1B")


def test_model_with_reentrant_checkpoints_is_rejected() -> None:
    model = REAL_MODELS["gpt2"]
    module = model.build()
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(TraceError, match=r"GPT2LMHeadModel cannot be traced: .*reentrant"):
        cut_real(model, module, "names 2")


@only_in_fuzz
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_grouped_experts_train_as_whole(schedule: str) -> None:
    model = REAL_MODELS["mixtral"]
    # There is no grouped product of float64.
    module = model.build(experts_implementation="grouped_mm").float()
    cut = "names 2" if schedule == "1F1B" else "names 4"
    check(model, module, cut, schedule, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def balanced_experts() -> RealModel:
    """A mixture whose loss is taken from the routers of all layers too."""
    mixtral = REAL_MODELS["mixtral"]
    labels = mixtral.batch().target
    model = with_kwargs(mixtral, labels=labels, output_router_logits=True)
    return model._replace(loss_fn=own_loss)


@only_in_fuzz
def test_load_balancing_loss_of_experts_in_all_stages_trains_as_whole() -> None:
    model = balanced_experts()
    check(model, model.build(), "names 2", "1F1B")


@only_in_fuzz
def test_load_balancing_loss_of_experts_cannot_be_counted_but_measured() -> None:
    model = balanced_experts()
    module = model.build()
    with pytest.raises(CostError, match=r"bincount.* depends on the values"):
        cut_real(model, module, "balanced 2")
    example = model.microbatches(model.batch())[0]
    costs = penstock.measure_layers(module, example.args, example.kwargs, repeats=1)
    policy = Balanced(2, costs=costs)
    pipe = penstock.cut(module, example.args, example.kwargs, split_policy=policy)
    assert 2 == pipe.num_stages


@only_in_fuzz
def test_experts_that_are_chosen_in_python_cannot_be_traced() -> None:
    model = REAL_MODELS["mixtral"]
    module = model.build(experts_implementation="eager")
    with pytest.raises(TraceError, match=r"modeling_mixtral\.py:\d+, in forward: for expert_idx"):
        cut_real(model, module, "names 2")


def test_model_that_returns_a_cache_cannot_be_traced() -> None:
    model = with_kwargs(REAL_MODELS["llama"], use_cache=True)
    with pytest.raises(TraceError, match=r"LlamaForCausalLM cannot be traced: .*DynamicCache"):
        cut_real(model, model.build(), "names 2")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["gpt2", "bert", "torch_transformer"] if IS_LONG else ["gpt2"])
def test_model_with_dropout_learns_and_drops_nothing_in_eval(name: str) -> None:
    model = REAL_MODELS[name]
    module = model.build(dropout=0.1)
    pipe = cut_real(model, module, "names 2")
    batch = model.batch()

    def main(group: LocalGroup) -> tuple[list[list[Tensor]], Any]:
        stage = pipe.build_stage(group.rank, CPU, group)
        pipeline = Pipeline(
            stage,
            "1F1B",
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=model.loss_fn,
            kwargs_chunk_spec=model.kwargs_chunk_spec(batch),
            timeout=HANG_S,
        )
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.02)
        found = []

        def evaluate() -> Any:
            losses: list[Tensor] = []
            stage.submod.eval()
            outputs = pipeline.eval(*batch.args, target=batch.target, losses=losses, **batch.kwargs)
            stage.submod.train()
            found.append(losses)
            return outputs

        evaluate()
        for _ in range(8):
            optimizer.zero_grad()
            losses: list[Tensor] = []
            pipeline.step(*batch.args, target=batch.target, losses=losses, **batch.kwargs)
            found.append(losses)
            optimizer.step()
        return found, evaluate()

    _, (found, outputs) = penstock.local_ranks(2, main)
    before, *steps, after = (sum(losses) for losses in found)
    assert after < before
    assert before != steps[0]  # A step does drop.
    # The stages hold the model's own parameters, which are trained by now.
    module.eval()
    whole = [module(*args, **kwargs) for args, kwargs, _ in model.microbatches(batch)]
    logits = [pytree.tree_leaves(output)[-1].detach() for output in whole]
    assert_close("outputs", torch.cat(logits), pytree.tree_leaves(outputs)[-1])
