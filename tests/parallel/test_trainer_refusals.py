"""What a Trainer offers and a pipeline does not do is refused before anything runs."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForMaskedLM, Trainer

from penstock.errors import CheckpointError, MicrobatchError, OptionError, PretrainedError
from penstock.parallel.hugging_face_trainer import PipelineTrainer
from penstock.parallel.trainer_refusals import (
    REFUSED_ARGUMENTS,
    REFUSED_OPTIONS,
    check_arguments,
    check_model,
    check_options,
)
from trainer_runs import TOKENS, VOCABULARY, make_args, make_model, make_rows


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make_masked_model() -> nn.Module:
    """A model whose loss is a mean, whatever number of labels it is given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(
        **sizes,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForMaskedLM(config)


def make_trainer(folder: Path, **options: Any) -> PipelineTrainer:
    chosen = {"model": make_model(), "args": make_args(folder), "eval_dataset": make_rows(8)}
    return PipelineTrainer(**{**chosen, "train_dataset": make_rows(16), **options})


def test_trainer_without_transformers_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, PipelineTrainer.__module__)
    message = r"^PipelineTrainer needs transformers and accelerate: pip install 'penstock\[hf\]'$"
    with pytest.raises(PretrainedError, match=message):
        import_module(PipelineTrainer.__module__)


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_argument_that_a_pipeline_cannot_follow_is_refused(name: str, tmp_path: Path) -> None:
    args = make_args(tmp_path)
    check_arguments(args)
    setattr(args, name, 1)
    reason = REFUSED_ARGUMENTS[name].reason
    with pytest.raises(OptionError, match=rf"^{name}=1 cannot be used on a pipeline. {reason}\."):
        check_arguments(args)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_n_gpu", 2, "this process has 2 GPUs. Expected one process for each"),
        ("optim", "lomo", "optim is 'lomo'. Expected one of torch's"),
        ("train_sampling_strategy", "group_by_length", "train_sampling_strategy is 'group_by_le"),
        ("per_device_eval_batch_size", 4, "per_device_eval_batch_size is 4, but per_device_tra"),
    ],
)
def test_argument_with_a_value_that_does_not_fit_is_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    args = make_args(tmp_path)
    setattr(args, name, value)
    with pytest.raises(OptionError, match=message):
        check_arguments(args)


def test_arguments_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    args = make_args(tmp_path)
    args.load_best_model_at_end = args.save_only_model = True
    with pytest.raises(OptionError, match="load_best_model_at_end and save_only_model were both"):
        check_arguments(args)
    args = make_args(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(OptionError, match="accelerator_config has split_batches or dispatch_ba"):
        check_arguments(args)


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_option_that_a_pipeline_cannot_follow_is_refused(name: str) -> None:
    reason = REFUSED_OPTIONS[name].reason
    with pytest.raises(OptionError, match=f"^{name} cannot be used on a pipeline. {reason}"):
        check_options({"model": nn.Linear(1, 1), name: print})


def test_optimizer_and_model_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(OptionError, match="optimizers was given, but a rank's optimizer has its"):
        check_options({"model": nn.Linear(1, 1), "optimizers": (object(), None)})
    check_options({"model": nn.Linear(1, 1), "optimizers": (None, None)})
    with pytest.raises(
        OptionError, match=r"model is a NoneType\. Expected a model of transformers"
    ):
        check_options({})
    with pytest.raises(OptionError, match="'1' normalizes over the batch, but a pipeline runs"):
        check_model(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    model = make_model()
    model.config.output_router_logits = True
    with pytest.raises(OptionError, match="configuration has output_router_logits, which adds"):
        check_model(model)
    model = make_model()
    model.hf_device_map = {"": "cpu"}
    with pytest.raises(OptionError, match="the model is quantized, or spread by a device_map"):
        check_model(model)


def test_own_loss_of_a_subclass_is_refused(tmp_path: Path) -> None:
    class Own(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(OptionError, match="Own overrides compute_loss, which a pipeline does not"):
        Own(make_model(), make_args(tmp_path))


def test_data_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError

    with pytest.raises(OptionError, match=r"the dataset is a Endless\. Expected one with a length"):
        make_trainer(tmp_path, args=make_args(tmp_path, max_steps=1), train_dataset=Endless())
    args = make_args(tmp_path, eval_strategy="no")
    with pytest.raises(OptionError, match="Expected a train_dataset or an eval_dataset, to cut"):
        make_trainer(tmp_path, args=args, train_dataset=None, eval_dataset=None)
    with pytest.raises(OptionError, match=r"a batch has 'input_ids'\. Expected labels too"):
        make_trainer(tmp_path, train_dataset=[{"input_ids": torch.arange(TOKENS)}] * 8)
    with pytest.raises(OptionError, match="'labels' of a batch is not a tensor of 8 rows"):
        make_trainer(tmp_path, data_collator=lambda rows: {"labels": [rows]})


def test_batches_that_stages_were_not_made_for_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    long = [{name: row.repeat(2) for name, row in rows.items()} for rows in make_rows(8)]
    expected = r"a batch has .*\(8, 16\).* Expected .*\(8, 8\).*: pad all rows to one length"
    with pytest.raises(MicrobatchError, match=expected):
        trainer.evaluate(long)
    with pytest.raises(OptionError, match="predictions were asked for, but the model's outputs"):
        trainer.predict(make_rows(8))
    with pytest.raises(OptionError, match="predictions were asked for, but the model's outputs"):
        trainer.prediction_step(trainer.pipe, {}, prediction_loss_only=False)
    with pytest.raises(CheckpointError, match=r"has no folder 'penstock'. Expected a checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_loss_that_is_a_mean_is_joined_by_labels_or_refused(tmp_path: Path) -> None:
    args = make_args(tmp_path)
    with pytest.raises(OptionError, match="a dataset has 12 rows, so its last batch has 4 of 8"):
        make_trainer(tmp_path, model=make_masked_model(), eval_dataset=make_rows(12))
    trainer = make_trainer(tmp_path, model=make_masked_model(), num_microbatches=4)
    plain = Trainer(make_masked_model(), args, eval_dataset=make_rows(8))
    expected = plain.evaluate()["eval_loss"]
    assert expected == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    rows = make_rows(8)
    for row in rows[:2]:
        row["labels"].fill_(-100)
    with pytest.raises(MicrobatchError, match="a microbatch has no labels, so its loss is not"):
        trainer.evaluate(rows)
    trainer._may_shift = True
    with pytest.raises(MicrobatchError, match=r"microbatches have .* labels, and this model does"):
        trainer.evaluate()
