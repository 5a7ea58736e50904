"""The model of a run, spread over its ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.comm import LocalGroup
from penstock.cutting import Balanced, CutModel, cut_any
from penstock.errors import OptionError
from penstock.ir import Rank
from penstock.parallel import ParallelModel, Pretrained, load_pretrained, parallelize
from penstock.parallel.transformers_parts import turn_off_caches
from penstock.schedules.given_shape import AUTO
from penstock.stage import Group
from penstock.training.forecast import Forecast, check_fits, forecast
from penstock.training.gpt import cut, initialise
from penstock.training.gpt_sizes import GptConfig
from penstock.training.model_sources import HuggingFaceModel, OwnModel
from penstock.training.orders import Orders
from penstock.training.settings import TrainConfig
from penstock.training.token_loss import next_token_loss
from penstock.user_code import errors_in_one_line, load_function


@dataclass(frozen=True, slots=True)
class Place:
    """A process among all that train: its pipeline, its rank there, and its device."""

    rank: Rank
    """The rank in its pipeline."""
    pipeline: int
    """The number of its pipeline, among replicas and shards."""
    device: torch.device
    group: Group = None
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, config: TrainConfig, group: Group, device: torch.device) -> "Place":
        """Find the place of this process; with several pipelines, make their mesh."""
        if isinstance(group, LocalGroup):
            if config.num_pipelines > 1:
                raise OptionError(
                    "--replicas and --shards need processes: ranks that are threads are one "
                    "pipeline. Train with `penstock train`."
                )
            return cls(group.rank, 0, device, group)
        if config.num_pipelines == 1:
            return cls(torch.distributed.get_rank(group), 0, device, group)
        sizes = {"dp": config.replicas, "fsdp": config.shards, "pp": config.num_ranks}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "pp"}
        mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
        rank = torch.distributed.get_rank()
        return cls(rank % config.num_ranks, rank // config.num_ranks, device, None, mesh)


def spread(
    config: TrainConfig,
    orders: Orders,
    place: Place,
    on_forecast: Callable[[Forecast], None] = lambda found: None,
) -> ParallelModel:
    """Make the model of a run, and keep this rank's stages of it, if it is expected to fit."""
    model, pieces = make_model(config, orders)
    example = example_of(config, config.num_microbatches)
    found = forecast(config, orders, pieces, as_inputs(config, example), target=example)
    on_forecast(found)
    check_fits(config, found, place.device)
    if isinstance(config.model, GptConfig):
        for stage in orders.placement.stages_of(place.rank):
            module = pieces.get_stage_module(stage).to_empty(device=place.device)
            initialise(module, config.model, config.seed)
    args, kwargs = as_inputs(config, example_of(config, 1))
    return parallelize(
        model,
        args,
        example_kwargs=kwargs,
        loss_fn=next_token_loss,
        schedule=AUTO if orders.schedule is None else orders.schedule,
        num_microbatches=config.num_microbatches,
        stages_per_rank=orders.placement.num_stages // config.num_ranks,
        cut=pieces,
        mesh=place.mesh,
        group=place.group,
        device=place.device,
        bad_values=None if config.skip_bad_steps is None else "skip",
        record=True,
    )


def make_model(
    config: TrainConfig, orders: Orders, *, is_dry: bool = False
) -> tuple[nn.Module | Pretrained, CutModel]:
    """Return the model of a run, and its stages; both are without values where they can be.

    If `is_dry`, a model of transformers is never given any.
    """
    dtype = getattr(torch, config.dtype)
    example = example_of(config, config.num_microbatches)
    model: nn.Module | Pretrained
    match config.model:
        case GptConfig():
            pieces = cut(config.model, orders.placement, microbatch=len(example), dtype=dtype)
            return nn.ModuleList(pieces.modules), pieces
        case HuggingFaceModel():
            with torch.device("meta") if is_dry else nullcontext():
                model = _of_transformers(config.model, config.seed, dtype)
        case OwnModel():
            model = _own(config.model, config.seed).to(dtype)
    policy = Balanced(
        orders.placement.num_stages,
        placement=orders.placement,
        loss_fn=next_token_loss,
        target=example,
    )
    whole = model.new_model() if isinstance(model, Pretrained) else model
    return model, cut_any(whole, policy, *as_inputs(config, example))


def example_of(config: TrainConfig, num_parts: int) -> Tensor:
    """Return tokens with the shape of a pipeline's batch, or of one of its parts."""
    rows = config.batch // config.num_pipelines // num_parts
    return torch.zeros(rows, config.context, dtype=torch.long)


def as_inputs(config: TrainConfig, tokens: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments with which the model takes tokens."""
    if isinstance(config.model, HuggingFaceModel):
        return (), {"input_ids": tokens}
    return (tokens,), {}


def _of_transformers(
    source: HuggingFaceModel, seed: int, dtype: torch.dtype
) -> nn.Module | Pretrained:
    """Return the model of a folder: its weights are read by stage, and random ones made whole."""
    if source.has_weights:
        return load_pretrained(source.path, dtype=dtype)
    transformers = import_module("transformers")
    with errors_in_one_line(f"transformers cannot make the model of {source.path}"):
        described = transformers.AutoConfig.from_pretrained(source.config_file)
        turn_off_caches(described)
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(described, dtype=dtype)
    return model.train()


def _own(source: OwnModel, seed: int) -> nn.Module:
    function = load_function(source.name)
    with errors_in_one_line(f"{source.name} failed"):
        torch.manual_seed(seed)
        model = function()
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{source.name} returned a {type(model).__name__}. Expected a model, an nn.Module that "
            "takes tokens and returns logits."
        )
    return model
