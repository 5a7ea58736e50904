"""`penstock dry-run`: run a step of any rank of a large pipeline on this machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import train_options
from penstock.cli.given import ShapeOptions, read_schedules
from penstock.cli.made_model import make_given, quieten_torch
from penstock.cli.options import AsJson, Microbatches, Ranks, StagesPerRank
from penstock.cli.plan_options import RankMemory
from penstock.cli.screen import print_json, print_table, sign_of_life
from penstock.costs.amounts import to_amount
from penstock.costs.units import in_memory
from penstock.errors import OptionError
from penstock.ir import Schedule
from penstock.training.choices import check_packages, make_config
from penstock.user_code import errors_in_one_line

if TYPE_CHECKING:  # torch is loaded when the command runs.
    from penstock.dry import DryRank, DryRun

_MOST_RANKS = 64  # Of `--rank all`: each takes seconds or more.


def dry_run(
    function: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Function that makes the model and a batch, as for plan. Or give --model.",
            show_default=False,
        ),
    ] = None,
    model: train_options.Model = None,
    layers: train_options.Layers = None,
    width: train_options.Width = None,
    heads: train_options.Heads = None,
    context: train_options.Context = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences in a batch; one per microbatch if not given."),
    ] = None,
    dtype: train_options.DtypeName = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Schedule: a name, or a CSV file.")
    ] = "ZB-V",
    stages_per_rank: StagesPerRank = None,
    rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R|all",
            help="Rank to run; may be repeated. Those that hold the most if not given.",
        ),
    ] = None,
    memory: RankMemory = None,
    as_json: AsJson = False,
) -> None:
    """Run a training step of any rank, without the other ranks and without values.

    Shows what the rank holds and sends, and proves that the messages of all ranks match. The
    runtime is that of a training, on tensors that have shapes only: a pipeline of hundreds of ranks
    can be tried on a laptop. Memory is counted as on the CPU, with AdamW as the optimizer.

    The model is named as for train, by --model and the options after it; or as for plan, by a
    function that returns (model, args, kwargs, loss_fn, target) for a whole batch.

    \b
    penstock dry-run --model tiny -p 2 -m 8
    penstock dry-run --layers 512 -p 512 -m 64 --schedule 1F1B --rank 0 --rank 511
    penstock dry-run --model folder/of/llama -p 16 -m 32 --dtype bfloat16 --memory 40GiB
    penstock dry-run my_model.py:make -p 8 -m 16 --schedule best.csv --rank all
    """
    named = {"model": model, "layers": layers, "width": width, "heads": heads, "context": context}
    named |= {"batch": batch, "dtype": dtype}
    given = {name: value for name, value in named.items() if value is not None}
    if function is not None and given:
        option = next(iter(given))
        raise OptionError(
            f"{function} and --{option} were both given. Expected a function that makes a model "
            "and a batch, or --model with its options: leave one of them out."
        )
    cap = None if memory is None else to_amount("--memory", memory)
    shape = ShapeOptions(ranks, microbatches, stages_per_rank)
    order = read_schedules([schedule], shape)[0].schedule
    chosen = _read_ranks(rank, order.num_ranks)
    with sign_of_life("Running"), errors_in_one_line("The model failed"):
        quieten_torch()
        if function is not None:
            found = _run_function(function, order, chosen, cap)
        else:
            found = _run_model(given, order, chosen, cap)
    if as_json:
        print_json(_facts(found))
    else:
        _print(found)


def _read_ranks(texts: list[str] | None, num_ranks: int) -> list[int] | None:
    if not texts:
        return None
    if texts == ["all"]:
        if num_ranks > _MOST_RANKS:
            raise OptionError(
                f"--rank is all, but there are {num_ranks} ranks. Expected at most {_MOST_RANKS}, "
                "as each takes seconds: name some, such as --rank 0 --rank 1. The messages of all "
                "are matched anyway."
            )
        return list(range(num_ranks))
    for text in texts:
        if text == "all":
            raise OptionError("--rank is all, beside others. Leave the others out.")
        if not text.isdecimal() or int(text) >= num_ranks:
            raise OptionError(
                f"--rank is {text!r}. Expected a rank from 0 to {num_ranks - 1}, or all."
            )
    return [int(text) for text in texts]


def _run_function(
    name: str, schedule: Schedule, ranks: list[int] | None, memory: float | None
) -> "DryRun":
    from penstock.dry import dry_run as run_dry

    model, question = make_given(name)
    if question["loss_fn"] is None:
        raise OptionError(
            f"{name} returned no loss_fn, but a dry run is of a training step. Expected "
            "(model, args, kwargs, loss_fn, target)."
        )
    return run_dry(
        model,
        question["batch"],
        example_kwargs=question["kwargs"],
        example_target=question["target"],
        loss_fn=question["loss_fn"],
        num_ranks=schedule.num_ranks,
        schedule=schedule,
        ranks=ranks,
        memory=memory,
    )


def _run_model(
    given: dict[str, Any], schedule: Schedule, ranks: list[int] | None, memory: float | None
) -> "DryRun":
    from penstock.training.dry_training import dry_run_of

    sizes = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    config = make_config({"batch": schedule.num_microbatches, **given, **sizes}, {})
    check_packages(config)
    return dry_run_of(config, schedule, ranks=ranks, memory=memory)


def _print(found: "DryRun") -> None:
    sizes = ("peak", "weights", "gradients", "optimizer", "activations")
    header = ("rank", "stages", "parameters", *sizes, "actions")
    rows = [
        (
            str(one.rank),
            ",".join(map(str, one.stages)),
            f"{one.num_parameters:,}",
            in_memory(one.peak_bytes, "bytes"),
            in_memory(one.parameter_bytes, "bytes"),
            in_memory(one.gradient_bytes, "bytes"),
            in_memory(one.optimizer_bytes, "bytes"),
            in_memory(one.activation_bytes, "bytes"),
            str(one.num_actions),
        )
        for one in found.ranks
    ]
    print_table(header, rows, words=("stages",))
    print_table(
        ("rank", "messages", "number", "bytes"),
        [row for one in found.ranks for row in _traffic_rows(one)],
        words=("messages",),
    )
    print(found.proven)


def _traffic_rows(one: "DryRank") -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each neighbour and direction."""
    for word, traffic in (("to", one.sent), ("from", one.received)):
        for other, found in traffic.items():
            size = in_memory(found.num_bytes, "bytes")
            yield str(one.rank), f"{word} rank {other}", str(found.num_messages), size


def _facts(found: "DryRun") -> dict[str, Any]:
    return {
        "num_ranks": found.num_ranks,
        "num_stages": found.num_stages,
        "num_microbatches": found.num_microbatches,
        "num_messages": found.num_messages,
        "message_bytes": found.message_bytes,
        "proven": found.proven,
        "ranks": [_rank_facts(one) for one in found.ranks],
    }


def _rank_facts(one: "DryRank") -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stages": one.stages,
        "num_parameters": one.num_parameters,
        "peak_bytes": one.peak_bytes,
        "parameter_bytes": one.parameter_bytes,
        "gradient_bytes": one.gradient_bytes,
        "optimizer_bytes": one.optimizer_bytes,
        "activation_bytes": one.activation_bytes,
        "num_actions": one.num_actions,
        "sent": {str(other): traffic._asdict() for other, traffic in one.sent.items()},
        "received": {str(other): traffic._asdict() for other, traffic in one.received.items()},
    }
