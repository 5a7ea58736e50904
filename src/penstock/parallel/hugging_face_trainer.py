"""The Trainer of transformers, for a model that is spread over the ranks of a pipeline.

Trainer calls its methods in the order of its own loop. Those that touch the model, its gradients
or files are overridden here, as its guide says; the loop, the logs, the schedule of learning rates
and the callbacks are as they were. A rank has the same batches as all others, so the Trainer is
told that its process is alone with its data (`DataState`): it shards no loader and averages
nothing.
"""

import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import (
    CheckpointError,
    MicrobatchError,
    OptionError,
    PretrainedError,
    StepError,
)
from penstock.extras import needed_by
from penstock.ir import Schedule
from penstock.microbatches import Replicate, TensorChunkSpec
from penstock.parallel.joining import join_ranks
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.parallelizing import parallelize
from penstock.parallel.trainer_parts import (
    align_tokens,
    causal_models,
    described,
    digest,
    num_labels,
    unwrapped_optimizer,
    with_own_data,
    without_adapter,
)
from penstock.parallel.trainer_refusals import check_arguments, check_model, check_options
from penstock.runtime import Auto
from penstock.runtime.own_loss import IGNORED

with needed_by(
    "PipelineTrainer", ["transformers", "accelerate"], extra="hf", error=PretrainedError
):
    Trainer: Any = import_module("transformers").Trainer

_FOLDER = "penstock"
"""The folder in a checkpoint that pipe.save() writes."""
_SCHEDULER, _DATA_DRAWS, _DRAWS = "scheduler.pt", "rng_state_data.pth", "rng_state_{}.pth"
_COUNT = "num_items_in_batch"


class PipelineTrainer(Trainer):  # type: ignore[misc]  # It is imported late.
    """A `transformers.Trainer` that trains on a pipeline; every rank makes it, and calls the same.

    All ranks run the same batches, of `per_device_train_batch_size` rows, which is cut into
    `num_microbatches`. `pipe` is the `ParallelModel`; the other options are those of `parallelize`.
    What a pipeline cannot do is refused when this is made.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *positional: Any,
        num_microbatches: int | None = None,
        schedule: Schedule | Auto | str = "ZB-V",
        stages_per_rank: int | None = None,
        cut: Any = None,
        **options: Any,
    ) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, model, args, *positional, **options)
        options = dict(list(bound.arguments.items())[3:])  # Those after self, model and args.
        check_options({"model": model, **options})
        check_arguments(args)
        check_model(model)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise OptionError(
                f"{type(self).__name__} overrides compute_loss, which a pipeline does not call: "
                "the loss is the one that the model computes. Use penstock.parallelize with a "
                "loss_fn."
            )
        join_ranks(args.device)
        self._given_args = args
        super().__init__(model, with_own_data(args), **options)
        self._draws = torch.random.get_rng_state()
        """The state of torch's generator for data, which is the same on all ranks."""
        self._divides = True
        """True if the model divides its loss by the number of labels that it is given."""
        self._may_shift = type(without_adapter(self.model)).__name__ in causal_models()
        """True if the first label of a row may not count."""
        align_tokens(self.model, self.processing_class)
        example = self._make_example()
        self._forms = {name: (tensor.shape, tensor.dtype) for name, tensor in example.items()}
        example = self._with_count(example, self._count(example), num_microbatches or 1)
        self.pipe: ParallelModel = parallelize(
            self.model,
            example,
            loss_fn="model",
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            cut=cut,
            device=args.device,
            loss_weight=self._weight,
            kwargs_chunk_spec={
                name: Replicate() if name == _COUNT else TensorChunkSpec(0) for name in example
            },
        )
        self._divides = self._finds_that_loss_is_divided(example)
        self._check_sizes()

    # 1. Data: the same on all ranks.

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise OptionError(
                f"the dataset is a {type(dataset).__name__}. Expected one with a length and an "
                "index, so that all ranks read the same rows."
            )
        loader = super()._get_dataloader(dataset, *args, **kwargs)
        sampler = loader.batch_sampler
        if hasattr(sampler, "process_index"):  # accelerate took a share of the batches.
            sampler.num_processes, sampler.process_index, sampler.even_batches = 1, 0, False
        if isinstance(loader.worker_init_fn, partial):  # It draws other seeds on each rank.
            start = loader.worker_init_fn
            loader.worker_init_fn = partial(start.func, **{**start.keywords, "rank": 0})
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with self._drawing_for_data():
            return super().get_batch_samples(*args, **kwargs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # It adds up those of all processes.
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.accelerator.num_processes

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the whole model where it is: a rank moves its own stages."""

    def _make_example(self) -> dict[str, Any]:
        """Return a whole batch, without a change to any generator."""
        if self.train_dataset is not None:
            loader = self.get_train_dataloader()
        elif self.eval_dataset is not None:
            named = self.eval_dataset
            loader = self.get_eval_dataloader(
                next(iter(named)) if isinstance(named, dict) else None
            )
        else:
            raise OptionError("Expected a train_dataset or an eval_dataset, to cut the model by.")
        rows, size = len(loader.dataset), self.args.per_device_train_batch_size
        with torch.random.fork_rng(devices=[]):
            batch = loader.collate_fn([loader.dataset[row % rows] for row in range(size)])
        if "labels" not in batch:
            raise OptionError(
                f"a batch has {', '.join(map(repr, batch))}. Expected labels too, which the model "
                "computes its loss from: let the data_collator add them."
            )
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != size:
                raise OptionError(
                    f"{name!r} of a batch is not a tensor of {size} rows. Expected only such "
                    "tensors, which can be cut into microbatches."
                )
        return dict(self._prepare_inputs(dict(batch)))

    @contextmanager
    def _drawing_for_data(self) -> Iterator[None]:
        """Draw from a generator that stages do not use, such as those with dropout."""
        own = torch.random.get_rng_state()
        torch.random.set_rng_state(self._draws)
        try:
            yield
        finally:
            self._draws = torch.random.get_rng_state()
            torch.random.set_rng_state(own)

    # 2. Steps.

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.pipe

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        names: list[str] = super().get_decay_parameter_names(self.model)
        return names

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's parameters."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(self.pipe)
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run a batch forward and backward on all ranks; return its loss on each."""
        batch = self._batch(inputs, num_items_in_batch)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        scale = 1.0 if is_scaled else 1 / self.current_gradient_accumulation_steps
        self.pipe.train()
        with self.accelerator.autocast():
            loss = self.pipe.step(
                **batch,
                target=batch["labels"],
                grad_scale=scale,
                finalize=self.accelerator.sync_gradients,
            )
        return self._as_loss(loss * scale)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch, on all ranks."""
        if not prediction_loss_only:
            raise _no_outputs()
        with self.accelerator.autocast():
            batch = self._batch(inputs, self._count(inputs))
            loss = self.pipe.evaluate(**batch, target=batch["labels"])
        return self._as_loss(loss), None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self._rows_of_batch
        with self._drawing_for_data():
            return super().evaluation_loop(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the outputs are on the rank of the last stage."""
        raise _no_outputs()

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def _batch(self, inputs: Any, count: Any) -> dict[str, Any]:
        """Return a batch as a step takes it; raise an error on all ranks if it cannot be run."""
        batch = self._filled(dict(inputs))
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}
        if len(set(self.pipe.pipeline.gather(digest(batch), "to compare their batches"))) > 1:
            raise StepError(
                "the ranks have different batches. Expected the same on all: the dataset and the "
                "data_collator may draw from torch's generator, but no row may depend on the rank."
            )
        if forms != self._forms:
            raise MicrobatchError(
                f"a batch has {described(forms)}. Expected {described(self._forms)}, as the "
                "batch that the model was cut by: pad all rows to one length, such as with "
                "padding='max_length', or leave out the last rows with dataloader_drop_last=True."
            )
        if not self._divides:
            self._check_labels(batch["labels"].chunk(self.pipe.num_microbatches))
        return self._with_count(self._prepare_inputs(batch), count, self.pipe.num_microbatches)

    def _filled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with rows that do not count in the place of those that it lacks."""
        missing = self._forms["labels"][0][0] - len(batch.get("labels", ()))
        if "labels" not in batch or missing <= 0 or not self._divides:
            return batch
        filled = {
            name: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            for name, tensor in batch.items()
        }
        for name in {"labels", "shift_labels"} & filled.keys():
            filled[name][-missing:] = IGNORED
        return filled

    def _count(self, batch: Mapping[str, Any]) -> Any:
        """Return the number of labels that count in the loss, or None if the model takes none."""
        return self._get_num_items_in_batch([batch], self.args.device)

    def _with_count(
        self, batch: dict[str, Any], count: Any, num_microbatches: int
    ) -> dict[str, Any]:
        """Give the model the number of labels, so that the mean over microbatches is its loss."""
        if count is None or not self.model_accepts_loss_kwargs:
            return batch
        return {**batch, _COUNT: torch.as_tensor(count).double() / num_microbatches}

    def _weight(self, labels: Tensor) -> float:
        """Return the share of a microbatch in the loss: of those that are means, its labels."""
        return 1.0 if self._divides else float(num_labels(labels))

    def _check_labels(self, parts: Sequence[Tensor]) -> None:
        """Raise an error if the losses of microbatches cannot be joined to that of the batch."""
        counts = {num_labels(part) for part in parts}
        if 0 in counts:
            raise MicrobatchError(
                "a microbatch has no labels, so its loss is not a number. Expected some in each: "
                "use fewer microbatches, or leave out such rows."
            )
        shifted = {num_labels(part[..., 1:]) for part in parts} if self._may_shift else {1}
        if self._may_shift and len(counts) + len(shifted) > 2:
            raise MicrobatchError(
                f"microbatches have {', '.join(map(str, sorted(counts)))} labels, and this model "
                f"does not divide its loss by {_COUNT}. Expected as many in each: leave no rows "
                "shorter than others."
            )

    def _finds_that_loss_is_divided(self, example: Mapping[str, Any]) -> bool:
        """Find out whether a loss is half of what it was if the number of labels is doubled."""
        if _COUNT not in example:
            return False
        once, twice = (
            float(
                self.pipe.evaluate(
                    **{**example, _COUNT: example[_COUNT] * factor}, target=example["labels"]
                )
            )
            for factor in (1, 2)
        )
        return abs(once - 2 * twice) <= 1e-3 * abs(once)

    def _as_loss(self, loss: Tensor) -> Tensor:
        return loss.reshape(()).to(self.args.device, torch.float32)

    def _rows_of_batch(self, values: Tensor) -> Tensor:
        """Return a value for each row of a batch; accelerate would add those of other ranks."""
        state = self.accelerator.gradient_state
        is_cut = state.end_of_dataloader and state.remainder > 0
        return values[: state.remainder] if is_cut else values

    def _check_sizes(self) -> None:
        """Raise an error if a last batch would be smaller, and cannot be filled up."""
        size, named = self.args.per_device_train_batch_size, self.eval_dataset
        sets = list(named.values()) if isinstance(named, dict) else [named]
        for dataset in [self.train_dataset, *sets]:
            rest = 0 if dataset is None else len(dataset) % size
            if rest and not self._divides and not self.args.dataloader_drop_last:
                raise OptionError(
                    f"a dataset has {len(dataset)} rows, so its last batch has {rest} of {size}, "
                    "and this model's loss has no way to leave out rows. Expected whole batches: "
                    "give dataloader_drop_last=True."
                )

    # 3. Files: all ranks write together.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that from_pretrained() loads; all ranks must call it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.pipe.save_pretrained(folder)
        if self.args.should_save:
            collator = getattr(self.data_collator, "tokenizer", None)
            if (processing := self.processing_class or collator) is not None:
                processing.save_pretrained(folder)
            torch.save(self._given_args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.pipe.save(Path(output_dir, _FOLDER), unwrapped_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _save_rng_state(self, output_dir: str) -> None:
        files = {_DRAWS.format(self.args.process_index): False}
        if self.args.should_save:
            files[_DATA_DRAWS] = True
        for name, is_data in files.items():
            with TemporaryDirectory() as folder:
                if is_data:
                    with self._drawing_for_data():
                        super()._save_rng_state(folder)
                else:
                    super()._save_rng_state(folder)
                shutil.move(Path(folder, "rng_state.pth"), Path(output_dir, name))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        data, own = Path(checkpoint, _DATA_DRAWS), _DRAWS.format(self.args.process_index)
        if data.exists():
            with TemporaryDirectory() as folder, self._drawing_for_data():
                shutil.copy(data, Path(folder, "rng_state.pth"))
                super()._load_rng_state(folder)
        if Path(checkpoint, own).exists():  # Otherwise other ranks have saved it.
            with TemporaryDirectory() as folder:
                shutil.copy(Path(checkpoint, own), Path(folder, "rng_state.pth"))
                super()._load_rng_state(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave the weights for later: they are loaded together with the optimizer."""
        self._state_folder(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.pipe.load(self._state_folder(checkpoint), unwrapped_optimizer(self.optimizer))
        state = torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        self.pipe.load(self._state_folder(self.state.best_model_checkpoint))

    def _state_folder(self, checkpoint: str) -> Path:
        folder = Path(checkpoint, _FOLDER)
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no folder {_FOLDER!r}. Expected a checkpoint that "
                "PipelineTrainer saved, without save_only_model."
            )
        return folder

    def end(self) -> None:
        """End the connections to other ranks, the trackers, and the process group."""
        self.pipe.close()
        super().end()


def _no_outputs() -> OptionError:
    return OptionError(
        "predictions were asked for, but the model's outputs are on the rank of the last stage "
        "only. Use evaluate() for the loss, or trainer.pipe.predict(**batch) for outputs."
    )
