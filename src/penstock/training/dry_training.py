"""A dry run of the model of a training."""

from collections.abc import Iterable

from penstock.dry import DryRun, dry_run
from penstock.ir import Schedule
from penstock.training.models import as_inputs, example_of, make_model
from penstock.training.orders import Orders
from penstock.training.settings import TrainConfig
from penstock.training.token_loss import next_token_loss


def dry_run_of(
    config: TrainConfig,
    schedule: Schedule,
    *,
    ranks: Iterable[int] | None,
    memory: float | None,
) -> DryRun:
    """Run a step of some ranks of a training, without values."""
    orders = Orders(schedule.placement, schedule, schedule.num_microbatches)
    model, pieces = make_model(config, orders, is_dry=True)
    tokens = example_of(config, 1)
    args, kwargs = as_inputs(config, tokens)
    return dry_run(
        model,
        args,
        example_kwargs=kwargs,
        example_target=tokens,
        loss_fn=next_token_loss,
        num_ranks=schedule.num_ranks,
        schedule=schedule,
        cut=pieces,
        ranks=ranks,
        memory=memory,
    )
