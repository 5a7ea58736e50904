"""Run a step of any rank of a pipeline, without the other ranks and without values."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

from penstock.costs import CostTable
from penstock.costs.units import in_memory
from penstock.cutting import Balanced, CutModel
from penstock.cutting.cut_model import as_keywords
from penstock.dry.dry_ranks import DryPipeline, MakeOptimizer, on_shapes_alone
from penstock.dry.dry_report import DryRank, DryRun
from penstock.dry.message_match import match_ranks
from penstock.dry.stage_forms import StageForms, find_forms
from penstock.errors import StageError
from penstock.ir import Rank, Schedule
from penstock.parallel.example_batch import Example, ExampleBatch, Microbatch
from penstock.parallel.given_cut import Cut, cut_as_given
from penstock.parallel.given_loss import loss_as_given
from penstock.parallel.pretrained import Pretrained
from penstock.parallel.schedule_choice import choose_schedule
from penstock.passes import verify
from penstock.passes.held_memory import held_along
from penstock.runtime.own_loss import OwnLoss
from penstock.runtime.step_settings import LossFn

# Steps without values take some milliseconds for each forward and backward. The heaviest ranks are
# run as long as they have fewer than this many together.
_FEW_ACTIONS = 1024
_STATES = 4  # A parameter, its gradient, and two moments: by these, ranks are compared.


def dry_run(
    model: nn.Module | Pretrained,
    example: Example = (),
    *,
    num_ranks: int,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: LossFn | Literal["model"],
    schedule: Schedule | str = "ZB-V",
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    cut: Cut = None,
    ranks: int | Iterable[int] | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    memory: float | None = None,
) -> DryRun:
    """Run a training step of some ranks in this process, without values and without other ranks.

    The stages, the schedule and the runtime are the real ones. Tensors have shapes but no values,
    so that any rank of a large pipeline can be run on a small machine. Memory is counted as on the
    CPU. The messages of all ranks are matched with each other, and those of the ranks that are run
    with what the others expect.

    The arguments are those of `penstock.parallelize`; the model may be on the meta device, and is
    left as it is. `example` and `example_target` are a whole batch. `ranks` are the ranks to run,
    by default those that hold the most by the order of their actions. `optimizer` makes the
    optimizer whose memory counts, given parameters. If a rank that is run holds more than `memory`
    bytes, an error says so.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(32)))
    ...     x = torch.empty(32, 64)
    >>> found = dry_run(model, x, num_ranks=16, example_target=x,
    ...     loss_fn=nn.functional.mse_loss, schedule="1F1B", ranks=3)
    >>> found.ranks[0].stages, found.ranks[0].sent[4].num_messages
    ((3,), 32)
    """
    _check_given(memory, optimizer)
    batch = ExampleBatch.of(example, example_kwargs, example_target)
    loss = loss_as_given(loss_fn)
    if loss is None:
        raise StageError(
            "loss_fn is None, but a dry run is of a training step. Give the loss_fn of the "
            "training, or 'model' if the model returns its own loss."
        )
    if batch.target is None and not isinstance(loss, OwnLoss):
        raise StageError(
            "example_target, the target of the batch, is missing: the last stage needs it for its "
            "loss. Give one for the whole batch; it may be on the meta device."
        )
    choice = choose_schedule(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        batch_size=batch.size(None, None),
        stages_per_rank=stages_per_rank,
    )
    if not isinstance(choice.schedule, Schedule):
        raise StageError(
            f"schedule is {schedule!r}, which is found in real steps. Expected a name, such as "
            "'ZB-V', or a Schedule: penstock.plan() finds one before the first step."
        )
    verify(choice.schedule)
    whole = model.new_model() if isinstance(model, Pretrained) else model
    pieces = _cut(whole, cut, choice.schedule, batch, loss)
    pipeline = _prepare(pieces, choice.schedule, batch, loss, optimizer)
    chosen = _choose_ranks(ranks, pipeline)
    last = choice.schedule.placement.ranks[-1]
    if not pipeline.forms.outputs_need_grad and last not in chosen:
        pipeline.run(last)  # Its losses say whether the step would train anything.
    found = tuple(_run(pipeline, rank, memory) for rank in chosen)
    return DryRun(
        ranks=found,
        num_ranks=num_ranks,
        num_stages=pieces.num_stages,
        num_microbatches=choice.num_microbatches,
        num_messages=sum(map(len, pipeline.sent.values())),
        message_bytes=_bytes_of_all(pipeline),
    )


def _check_given(memory: float | None, optimizer: MakeOptimizer) -> None:
    if memory is not None and not (isinstance(memory, Real) and memory > 0):  # Or nan.
        raise StageError(f"memory is {memory!r}. Expected a number of bytes above 0.")
    if not callable(optimizer):
        raise StageError(
            f"optimizer is {optimizer!r}. Expected what makes one, given parameters, such as "
            "torch.optim.AdamW."
        )


def _cut(
    model: nn.Module, cut: Cut, schedule: Schedule, batch: ExampleBatch, loss: LossFn
) -> CutModel:
    microbatch = batch.first_microbatch(schedule.num_microbatches, None, None)
    is_balanced = cut is None or (isinstance(cut, Balanced) and not cut.knows_loss)
    counts_loss = is_balanced and not isinstance(loss, OwnLoss)
    target = microbatch.target if counts_loss else None
    example = Microbatch(microbatch.args, microbatch.kwargs, target)
    return cut_as_given(model, cut, schedule.placement, example, loss)


def _prepare(
    pieces: CutModel,
    schedule: Schedule,
    batch: ExampleBatch,
    loss: LossFn,
    optimizer: MakeOptimizer,
) -> DryPipeline:
    """Find the forms of all messages, and match those of all ranks."""
    if pieces.repeats_inputs:
        kwargs = as_keywords(pieces.modules[0], batch.args, batch.kwargs)
        batch = ExampleBatch((), kwargs, batch.target)
    microbatch = batch.first_microbatch(schedule.num_microbatches, None, None)
    with on_shapes_alone():
        forms = find_forms(pieces, microbatch.args, microbatch.kwargs)
    sent = match_ranks(schedule, forms)
    return DryPipeline(pieces, schedule, forms, sent, batch, loss, optimizer)


def _bytes_of_all(pipeline: DryPipeline) -> int:
    ends = (message[:2] for messages in pipeline.sent.values() for message in messages)
    by_ends = {
        (maker, taker): sum(t.shape.numel() * t.dtype.itemsize for t in form.tensors)
        for (maker, taker), form in pipeline.forms.by_ends.items()
    }
    return sum(map(by_ends.__getitem__, ends))


def _choose_ranks(given: int | Iterable[int] | None, pipeline: DryPipeline) -> Sequence[Rank]:
    """Return the ranks to run: those given, or the heaviest by their orders."""
    num_ranks = pipeline.schedule.num_ranks
    if given is not None:
        ranks = list(given) if isinstance(given, Iterable) else [given]
        if not ranks:
            raise StageError("ranks is empty. Give at least one rank to run, or leave it out.")
        for rank in ranks:
            is_number = isinstance(rank, int) and not isinstance(rank, bool)
            if not is_number or rank not in range(num_ranks):
                raise StageError(
                    f"ranks has {rank!r}. Expected ranks of the pipeline: 0 to {num_ranks - 1}."
                )
        return list(dict.fromkeys(ranks))
    orders = pipeline.schedule.orders
    heaviest = _by_weight(pipeline.schedule, pipeline.forms)
    count, room = 1, _FEW_ACTIONS - len(orders[heaviest[0]])
    for rank in heaviest[1:]:
        room -= len(orders[rank])
        if room < 0:
            break
        count += 1
    return heaviest[:count]


def _by_weight(schedule: Schedule, forms: StageForms) -> list[Rank]:
    """Return all ranks, those first that are expected to hold the most."""
    ones = [1.0] * schedule.num_stages
    costs = CostTable(
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        after_forward=list(map(float, forms.held_bytes)),
    )
    weights = []
    for rank in range(schedule.num_ranks):
        held = max((held.during for held in held_along(schedule, rank, costs)), default=0.0)
        own = (forms.parameter_bytes[stage] for stage in schedule.placement.stages_of(rank))
        weights.append(held + _STATES * sum(own))
    return sorted(range(schedule.num_ranks), key=lambda rank: (-weights[rank], rank))


def _run(pipeline: DryPipeline, rank: Rank, memory: float | None) -> DryRank:
    found = pipeline.run(rank)
    if memory is not None and found.peak_bytes > memory:
        raise StageError(
            f"the training does not fit: {found}, but memory is {in_memory(memory, 'bytes')}. Use "
            "more ranks or microbatches, a schedule that holds less, such as V-Min, or smaller "
            "batches."
        )
    return found
