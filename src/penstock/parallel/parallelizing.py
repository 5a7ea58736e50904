"""One call from a model to a pipeline that trains it."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm import LocalGroup
from penstock.comm.pipelines_together import Peers
from penstock.ir import Schedule
from penstock.microbatches.loss_weights import LossWeight
from penstock.parallel.example_batch import Example, ExampleBatch
from penstock.parallel.given_cut import Cut, chosen_cut
from penstock.parallel.given_loss import loss_as_given
from penstock.parallel.joining import choose_device, joined_ranks
from penstock.parallel.mesh_dims import MeshDims
from penstock.parallel.parallel_model import ParallelModel
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.rank_stages import build_stages
from penstock.parallel.rebalancing import Recutting, empty_copy
from penstock.parallel.saved_folder import SavedModel
from penstock.parallel.schedule_choice import choose_schedule
from penstock.parallel.spreading import Spreading
from penstock.parallel.stage_optimizers import (
    MakeOptimizer,
    check_skips,
    make_optimizers,
    stepping,
)
from penstock.parallel.tied_values import check_tied_values
from penstock.runtime import Auto, Pipeline
from penstock.runtime.bad_values.value_guard import BadValues
from penstock.runtime.pipeline import DEFAULT_TIMEOUT_S
from penstock.runtime.step_settings import LossFn
from penstock.stage import Group, PipelineStage


def parallelize(
    model: nn.Module | Pretrained,
    example: Example = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
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
    by_work: bool = False,
    bad_values: BadValues | None = None,
    compile: bool = False,
    record: bool = False,
    slow_when: float | None = None,
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
    only `predict`. The balanced cut counts what the loss costs, which is much if the vocabulary is
    large. For a function that is not torch's own, this needs `example_target`, a target as `step`
    will be given.

    `schedule` is a name, a Schedule, "auto" or an `Auto(...)`. `cut` says where stages begin:
    nothing for balanced stages, or names of modules, a `split_spec`, a policy, or a `CutModel`.

    `mesh` has a dimension "pp", and may have "dp" for replicas, "fsdp" for parameters that
    fully_shard spreads, with `fsdp_options`, and "tp" for layers that are spread by `tp_plan`.

    With `bad_values`, steps whose loss or gradients are not finite are logged ("report"), lose
    their gradients on all ranks ("skip") or are errors ("raise"); `bad_value` says where it began.

    With `by_work`, `step` takes the `work` of each microbatch, and runs them in a quicker order.

    With `optimizer_in_backward`, which makes an optimizer of named parameters, each stage's
    optimizer steps as soon as the stage's gradients are complete.

    With `slow_when`, such as 0.5, ranks and links that become 50 % slower are named in the log.

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
    check_skips(optimizer_in_backward, bad_values)
    batch = ExampleBatch.of(example, example_kwargs, example_target)
    loss = loss_as_given(loss_fn)
    saved = SavedModel.of(model)
    where = choose_device() if device is None else torch.device(device)
    specs = {"args_chunk_spec": args_chunk_spec, "kwargs_chunk_spec": kwargs_chunk_spec}
    with joined_ranks(where, group) as owns_group:
        dims = MeshDims.of(mesh, group)
        choice = choose_schedule(
            schedule,
            num_ranks=dims.place[1],
            num_microbatches=num_microbatches,
            batch_size=batch.size(**specs),
            stages_per_rank=stages_per_rank,
        )
        microbatch = batch.first_microbatch(choice.num_microbatches, **specs)
        spreading = Spreading(dims, tp_plan or {}, fsdp_options or {})
        skeleton = empty_copy(
            model,
            saved,
            dims,
            cut,
            is_compiled=compile,
            steps_in_backward=optimizer_in_backward is not None,
        )
        own = build_stages(
            model,
            cut,
            choice.placement,
            microbatch,
            loss,
            spreading,
            where,
            is_shared=isinstance(group, LocalGroup),
            is_compiled=compile,
        )
        del model  # So that parameters that are spread below can be freed.
        gc.collect()
        for stage in own.stages:
            spreading.apply(stage)
        optimizers = make_optimizers(own.stages, optimizer_in_backward)

        def make_pipeline(stages: Sequence[PipelineStage]) -> Pipeline:
            return Pipeline(
                stages,
                choice.schedule,
                num_microbatches=choice.num_microbatches,
                loss_fn=loss,
                output_merge_spec=output_merge_spec,
                scale_grads=scale_grads,
                loss_weight=loss_weight,
                replica_group=dims.replicas if loss is not None and scale_grads else None,
                on_grads_ready=stepping(optimizers) if optimizers else None,
                by_work=by_work,
                bad_values=bad_values,
                compile=compile,
                timeout=timeout,
                record=record,
                slow_when=slow_when,
                **specs,
            )

        pipeline = make_pipeline(own.stages)
        check_tied_values(pipeline)
        return ParallelModel(
            pipeline,
            names=own.names,
            inputs=own.inputs,
            optimizers=optimizers,
            owns_group=owns_group,
            stays_in_eval=own.stays_in_eval,
            saved=saved,
            peers=Peers.of(dims.peer_groups, where, timeout),
            recutting=Recutting.of(
                skeleton,
                chosen_cut(cut, choice.placement, microbatch, loss),
                choice.placement,
                microbatch,
                where,
                dims.pipeline,
                make_pipeline,
            ),
        )
