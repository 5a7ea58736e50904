"""What a Trainer of transformers offers, and a pipeline does not do.

Each is refused before anything runs: none is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import OptionError

_OF_OTHERS = "The layers are spread over ranks by the pipeline alone"
_OF_DDP = "It is for DistributedDataParallel, which is not used"
_LOGITS = "The model's outputs are on the rank of the last stage only"
_ONE_LOSS = "The loss is the one that the model computes from its labels"
_ALL_VALUES = "Ranks hold only their own layers"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that has to keep its default, and why."""

    default: Any
    reason: str
    remedy: str = "Leave it out"


REFUSED_ARGUMENTS: Mapping[str, Refusal] = {
    "auto_find_batch_size": Refusal(False, "A batch has the shapes that the stages were made for"),
    "batch_eval_metrics": Refusal(False, _LOGITS),
    "bf16_full_eval": Refusal(False, "Stages keep their dtype", "Use bf16"),
    "ddp_broadcast_buffers": Refusal(None, _OF_DDP),
    "ddp_bucket_cap_mb": Refusal(None, _OF_DDP),
    "ddp_find_unused_parameters": Refusal(None, _OF_DDP),
    "ddp_static_graph": Refusal(None, _OF_DDP),
    "debug": Refusal([], _ALL_VALUES),
    "deepspeed": Refusal(None, _OF_OTHERS),
    "enable_jit_checkpoint": Refusal(False, "All ranks have to save together", "Use save_steps"),
    "fp16": Refusal(False, "torch's GradScaler skips steps on each rank alone", "Use bf16"),
    "fp16_full_eval": Refusal(False, "Stages keep their dtype", "Use bf16"),
    "fsdp": Refusal(None, _OF_OTHERS),
    "gradient_checkpointing": Refusal(
        False, "The backward of a stage is split", "Use a schedule with less memory, such as V-Min"
    ),
    "include_for_metrics": Refusal([], _LOGITS),
    "label_smoothing_factor": Refusal(0.0, _ONE_LOSS),
    "neftune_noise_alpha": Refusal(None, "It hooks into the embedding of the whole model"),
    "optim_target_modules": Refusal(None, _ALL_VALUES),
    "parallelism_config": Refusal(None, _OF_OTHERS),
    "push_to_hub": Refusal(False, "The folder is written by all ranks", "Upload the saved folder"),
    "save_on_each_node": Refusal(False, "All ranks write to one folder"),
    "torch_compile": Refusal(False, "It compiles the whole model", "Use penstock.parallelize"),
    "torch_empty_cache_steps": Refusal(None, "A step runs many microbatches at once"),
    "use_liger_kernel": Refusal(False, "It changes the model after it was cut"),
}
"""The fields of TrainingArguments that have to keep their defaults."""

REFUSED_OPTIONS: Mapping[str, Refusal] = {
    "compute_loss_func": Refusal(None, _ONE_LOSS, "Use penstock.parallelize with a loss_fn"),
    "compute_metrics": Refusal(None, _LOGITS, "Use pipe.predict() on batches of your own"),
    "model_init": Refusal(None, "A model is cut once", "Give the model"),
    "preprocess_logits_for_metrics": Refusal(None, _LOGITS),
}
"""The arguments of a Trainer that have to keep their defaults."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Optimizers of torch. Their update of a parameter depends on that parameter alone."""


def check_arguments(args: Any) -> None:
    """Raise an error if a field of TrainingArguments is one that a pipeline cannot follow."""
    for name, refusal in REFUSED_ARGUMENTS.items():
        if (value := getattr(args, name)) != refusal.default and value:
            _refuse(f"{name}={value!r}", refusal)
    if args.n_gpu > 1:
        raise OptionError(
            f"this process has {args.n_gpu} GPUs. Expected one process for each: run the script "
            "with torchrun."
        )
    if str(getattr(args.optim, "value", args.optim)) not in OPTIMIZERS:
        raise OptionError(
            f"optim is {str(args.optim)!r}. Expected one of torch's, which treat each parameter by "
            f"itself: {', '.join(OPTIMIZERS)}."
        )
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise OptionError(
            f"train_sampling_strategy is {args.train_sampling_strategy!r}. Expected 'random' or "
            "'sequential': all batches must have the same shapes."
        )
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise OptionError(
            "accelerator_config has split_batches or dispatch_batches, which share a batch out "
            "among processes. Expected neither: all ranks of a pipeline have the same batch."
        )
    if args.per_device_eval_batch_size != args.per_device_train_batch_size:
        raise OptionError(
            f"per_device_eval_batch_size is {args.per_device_eval_batch_size}, but "
            f"per_device_train_batch_size is {args.per_device_train_batch_size}. Expected the "
            "same: the stages are made for one shape."
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise OptionError(
            "load_best_model_at_end and save_only_model were both given, but the best model is "
            "loaded from the state for resuming. Give one of them."
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an error if an argument of a Trainer is one that a pipeline cannot follow."""
    for name, refusal in REFUSED_OPTIONS.items():
        if options.get(name) is not None:
            _refuse(name, refusal)
    if any(given is not None for given in options.get("optimizers") or ()):
        raise OptionError(
            "optimizers was given, but a rank's optimizer has its own parameters only, which are "
            "known once the model is cut. Give optimizer_cls_and_kwargs, and lr_scheduler_type."
        )
    if not isinstance(options.get("model"), nn.Module):
        raise OptionError(
            f"model is a {type(options.get('model')).__name__}. Expected a model of transformers."
        )


def check_model(model: nn.Module) -> None:
    """Raise an error if a model's loss on microbatches would not be that on the batch."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if found := [name for name, module in model.named_modules() if isinstance(module, norms)]:
        raise OptionError(
            f"{found[0]!r} normalizes over the batch, but a pipeline runs microbatches. Expected "
            "layers that treat each row by itself."
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise OptionError(
            "the model's configuration has output_router_logits, which adds a loss over the whole "
            "batch, but a pipeline runs microbatches. Set it to False."
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None):
        raise OptionError(
            "the model is quantized, or spread by a device_map. Expected one with plain weights."
        )


def _refuse(what: str, refusal: Refusal) -> None:
    raise OptionError(f"{what} cannot be used on a pipeline. {refusal.reason}. {refusal.remedy}.")
