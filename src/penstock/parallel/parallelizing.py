"""One call from a model to a pipeline that trains it."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm import LocalGroup
from penstock.comm.pipelines_together import Peers
from penstock.cutting import Balanced, CutModel, SplitPoint, cut_any
from penstock.cutting import cut as trace_and_cut
from penstock.errors import MicrobatchError, StageError
from penstock.ir import Schedule, StageId
from penstock.microbatches import split_args_kwargs_into_chunks
from penstock.microbatches.loss_weights import LossWeight
from penstock.parallel.given_inputs import GivenInputs
from penstock.parallel.joining import choose_device, join_ranks
from penstock.parallel.mesh_dims import MeshDims
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.saved_folder import SavedModel
from penstock.parallel.schedule_choice import Choice, choose_schedule
from penstock.parallel.spreading import Spreading, names_of_modules
from penstock.parallel.stage_names import StageNames
from penstock.parallel.tied_values import check_tied_values
from penstock.runtime import Auto, Pipeline
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S
from penstock.runtime.step_settings import LossFn
from penstock.stage import Group, GroupOrMesh, PipelineStage
from penstock.stage.stage_checks import unwrapped
from penstock.torch_private import pytree

Example: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
Cut: TypeAlias = CutModel | Mapping[str, SplitPoint] | Sequence[str] | Balanced | None
MakeOptimizer: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def parallelize(
    model: nn.Module | Pretrained,
    example: Example = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | Literal["model"] | None = None,
    schedule: Schedule | Auto | str = "ZB-V",
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    cut: Cut = None,
    mesh: DeviceMesh | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
    optimizer_in_backward: MakeOptimizer | None = None,
    scale_grads: bool = True,
    loss_weight: LossWeight | None = None,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
    output_merge_spec: Any = None,
    compile: bool = False,
    record: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> ParallelModel:
    """Spread a model over the ranks of a pipeline, and return what trains it.

    Every rank calls this with the same model. It keeps the parameters of its own stages; the model
    is left without those of other ranks. In place of a model, give what `penstock.load_pretrained`
    returns: then a rank reads only the weights of its own stages. Under torchrun, the process group
    is made if there is none; without a launcher, this process is the only rank.

    `example` is a batch as `step` will be given: a tensor, a tuple of arguments, or a dict of
    keyword arguments; `example_kwargs` are for a model that takes both. `num_microbatches` is how
    many microbatches it is cut into, by default up to twice the number of ranks.

    `loss_fn(output, target)` returns the mean over a microbatch; "model" is for a model that
    returns its own, as those of transformers do that are given labels. Without it, the model can
    only `predict`.

    `schedule` is a name, a Schedule, "auto" or an `Auto(...)`. `cut` says where stages begin:
    nothing for balanced stages, or names of modules, a `split_spec`, a policy, or a `CutModel`.

    `mesh` has a dimension "pp", and may have "dp" for replicas, "fsdp" for parameters that
    fully_shard spreads, with `fsdp_options`, and "tp" for layers that are spread by `tp_plan`.

    With `optimizer_in_backward`, which makes an optimizer of named parameters, each stage's
    optimizer steps as soon as the stage's gradients are complete.

        >>> import torch, penstock
        >>> from torch import nn
        >>> def main(group):
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        ...     x, target = torch.randn(2, 8, 4)
        ...     pipe = penstock.parallelize(model, x, loss_fn=nn.functional.mse_loss, group=group)
        ...     return pipe.step(x, target=target).item()
        >>> one, other = penstock.local_ranks(2, main)
        >>> one == other
        True
    """
    args, kwargs = _as_arguments(example, example_kwargs)
    saved = SavedModel.of(model)
    weights = model if isinstance(model, Pretrained) else None
    model = model.new_model() if isinstance(model, Pretrained) else model
    where = choose_device() if device is None else torch.device(device)
    owns_group = not isinstance(group, LocalGroup) and join_ranks(where)
    dims = MeshDims.of(mesh, group)
    rank, num_ranks = dims.place
    choice = choose_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        batch_size=_batch_size(args, kwargs),
        stages_per_rank=stages_per_rank,
    )
    specs = {"args_chunk_spec": args_chunk_spec, "kwargs_chunk_spec": kwargs_chunk_spec}
    mb_args, mb_kwargs = _first_microbatch(args, kwargs, choice.num_microbatches, specs)
    pieces = _cut(model, cut, choice, mb_args, mb_kwargs)
    spreading = Spreading(dims, tp_plan or {}, fsdp_options or {})
    spreading.check(names_of_modules(pieces.modules))
    names = StageNames.of(pieces.modules)
    inputs = GivenInputs.by_name(model) if pieces.repeats_inputs else GivenInputs()
    held = choice.placement.stages_of(rank)
    stages = [_build_stage(pieces, index, where, dims.pipeline, weights) for index in held]
    if not isinstance(group, LocalGroup):  # Otherwise other ranks have the same model.
        _free_others(model, stages)
    del pieces, model
    gc.collect()
    for stage in stages:
        spreading.apply(stage)
    optimizers = _make_optimizers(stages, optimizer_in_backward)
    pipeline = Pipeline(
        stages,
        choice.schedule,
        num_microbatches=choice.num_microbatches,
        loss_fn=_own_loss if loss_fn == "model" else loss_fn,
        output_merge_spec=output_merge_spec,
        scale_grads=scale_grads,
        loss_weight=loss_weight,
        on_grads_ready=_stepping(optimizers) if optimizers else None,
        compile=compile,
        timeout=timeout,
        record=record,
        **specs,
    )
    check_tied_values(pipeline)
    return ParallelModel(
        pipeline,
        names=names,
        inputs=inputs,
        optimizers=optimizers,
        owns_group=owns_group,
        saved=saved,
        peers=Peers.of(dims.peer_groups, where, timeout),
    )


def _build_stage(
    pieces: CutModel,
    index: StageId,
    device: torch.device,
    group: GroupOrMesh,
    weights: Pretrained | None,
) -> PipelineStage:
    """Return a stage on the device, with values from a folder if the model has none."""
    module = pieces.get_stage_module(index)
    buffers = {} if weights is None else weights.fill(module, device)
    return pieces.build_stage(index, device, group, buffers=buffers)


def _as_arguments(
    example: Example, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        if example_kwargs is not None:
            raise StageError(
                "example is a dict of keyword arguments, and example_kwargs was given too. Give "
                "the arguments as a tuple, and the keyword arguments as example_kwargs."
            )
        return (), dict(example)
    args = tuple(example) if isinstance(example, list | tuple) else (example,)
    return args, dict(example_kwargs or {})


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    leaves = pytree.tree_leaves((args, kwargs))
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes:
        raise MicrobatchError(
            "example has no tensor that could be cut into microbatches. Expected a batch, as "
            "step() will be given: parallelize(model, example=(tokens,), …)."
        )
    return sizes[0]


def _first_microbatch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatches: int,
    specs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first microbatch; raise an error if others would have other shapes."""
    split_args, split_kwargs = split_args_kwargs_into_chunks(
        args,
        kwargs,
        num_microbatches,
        specs["args_chunk_spec"] if args else None,
        specs["kwargs_chunk_spec"] if kwargs else None,
    )
    first, last = (
        [leaf.shape for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)]
        for each in ((split_args[0], split_kwargs[0]), (split_args[-1], split_kwargs[-1]))
    )
    if first != last:
        raise MicrobatchError(
            f"example is a batch of {_batch_size(args, kwargs)}, which cannot be cut into "
            f"{num_microbatches} equal microbatches. Expected a whole batch, as step() will be "
            "given, of a multiple of num_microbatches."
        )
    return split_args[0], split_kwargs[0]


def _cut(
    model: nn.Module,
    given: Cut,
    choice: Choice,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any],
) -> CutModel:
    num_stages = choice.placement.num_stages
    match given:
        case None:
            policy = Balanced(num_stages, placement=choice.placement)
            return cut_any(model, policy, mb_args, mb_kwargs)
        case CutModel():
            pieces = given
        case Balanced():
            return cut_any(model, given, mb_args, mb_kwargs)
        case Mapping():
            pieces = trace_and_cut(model, mb_args, mb_kwargs, split_spec=given)
        case str():
            raise StageError(
                f"cut is {given!r}. Expected names of modules, such as ['layers.4', 'layers.8']."
            )
        case Sequence():
            spec = {name: SplitPoint.BEGINNING for name in given}
            pieces = trace_and_cut(model, mb_args, mb_kwargs, split_spec=spec)
        case _:
            raise StageError(
                f"cut is a {type(given).__name__}. Expected names of modules at which stages "
                "begin, a split_spec, a Balanced policy, or a CutModel."
            )
    if pieces.num_stages != num_stages:
        raise StageError(
            f"the model was cut into {pieces.num_stages} stages, but the schedule has {num_stages} "
            f"on {choice.placement.num_ranks} ranks. Give one cut less than it has stages, or "
            "another schedule or stages_per_rank."
        )
    return pieces


def _free_others(model: nn.Module, stages: Sequence[PipelineStage]) -> None:
    """Take the parameters and buffers of other ranks out of the model, which the caller has."""
    held = {
        tensor
        for stage in stages
        for tensor in (*stage.submod.parameters(), *stage.submod.buffers())
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in held:
                empty = torch.empty_like(parameter, device="meta")
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer not in held:
                setattr(module, name, torch.empty_like(buffer, device="meta"))


def _make_optimizers(
    stages: Sequence[PipelineStage], make: MakeOptimizer | None
) -> dict[StageId, torch.optim.Optimizer]:
    if make is None:
        return {}
    named = {
        stage.stage_index: [
            (name, parameter)
            for name, parameter in unwrapped(stage.submod).named_parameters()
            if parameter.requires_grad
        ]
        for stage in stages
    }
    return {stage: make(parameters) for stage, parameters in named.items() if parameters}


def _stepping(
    optimizers: Mapping[StageId, torch.optim.Optimizer],
) -> Callable[[PipelineStage], None]:
    def step(stage: PipelineStage) -> None:
        optimizer = optimizers.get(stage.stage_index)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _own_loss(output: Any, target: Any) -> Any:
    """Return the loss that a model has computed."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise StageError(
            f"loss_fn is 'model', but the model returned a {type(output).__name__} without a loss. "
            "Give step() what the model computes it from, such as labels=…, or give parallelize() "
            "a loss_fn."
        )
    return loss
