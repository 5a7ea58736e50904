"""`penstock train`: train a language model on the processes of one machine or several."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import train_options as options
from penstock.cli.ranks import be_rank, start_ranks
from penstock.cli.train_display import make_display
from penstock.training.choices import Data, check_run, make_config
from penstock.training.launching import Attempt, is_worker
from penstock.training.rank_processes import Failure
from penstock.training.restarting import Restarts
from penstock.training.run_files import read_options
from penstock.training.saved import saved_steps
from penstock.training.settings import TrainConfig


def train(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Options in a TOML file; those given here win."),
    ] = None,
    model: options.Model = None,
    layers: options.Layers = None,
    width: options.Width = None,
    heads: options.Heads = None,
    context: options.Context = None,
    data: options.Data = None,
    tokenizer: options.TokenizerFile = None,
    ranks: options.Ranks = None,
    replicas: options.Replicas = None,
    shards: options.Shards = None,
    schedule: options.ScheduleName = None,
    stages_per_rank: options.StagesPerRank = None,
    microbatches: options.Microbatches = None,
    batch: options.Batch = None,
    accumulate: options.Accumulate = None,
    steps: options.Steps = None,
    lr: options.Lr = None,
    min_lr: options.MinLr = None,
    warmup: options.Warmup = None,
    weight_decay: options.WeightDecay = None,
    clip: options.Clip = None,
    skip_bad_steps: options.SkipBadSteps = None,
    dtype: options.DtypeName = None,
    autocast: options.AutocastName = None,
    seed: options.Seed = None,
    eval_every: options.EvalEvery = None,
    eval_share: options.EvalShare = None,
    eval_data: options.EvalData = None,
    eval_batches: options.EvalBatches = None,
    evaluate_only: options.EvaluateOnly = None,
    checkpoint: options.Checkpoint = None,
    every: options.Every = None,
    keep: options.Keep = None,
    resume: options.Resume = None,
    restarts: options.Restarts = None,
    min_ranks: options.MinRanks = None,
    spares: options.Spares = None,
    snapshot_every: options.SnapshotEvery = None,
    export: options.Export = None,
    sample: options.Sample = None,
    record: options.Record = None,
    log: options.Log = None,
    tensorboard: options.TensorboardFolder = None,
    wandb: options.WandbProject = None,
    memory: options.MemoryCap = None,
    force: options.Force = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each step.")
    ] = False,
) -> None:
    """Train a language model in pipeline-parallel stages, on your text.

    Without options, a small GPT learns the source code of Python, byte by byte. All options can
    be in a TOML file, under the same names. A resumed training may use other ranks and another
    schedule than before; what is left out is as it was. On several machines, start it on each
    with torchrun.

    \b
    penstock train --model tiny --steps 300 --checkpoint runs/first
    penstock train --steps 600 --checkpoint runs/first --resume --ranks 4 --schedule 1F1B
    penstock train --model folder/of/llama --data book.txt --dtype bfloat16 --clip 1 \\
        --warmup 100 --min-lr 1e-5 --lr 1e-4 --eval-every 100 --checkpoint runs/book
    penstock train run.toml --steps 1000
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m penstock train --model large --checkpoint /shared/run
    """
    given = _given(locals())
    if file is not None:
        given = {**read_options(file), **given}
    raise typer.Exit(run_training(given, as_json))


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, by their names as they are typed."""
    return {
        name.replace("_", "-"): value
        for name, value in arguments.items()
        if name not in ("file", "as_json") and value not in (None, [])
    }


def run_training(given: Mapping[str, Any], as_json: bool) -> int:
    """Run as one of the ranks, or start them; return the exit code."""
    config = make_config(given, os.environ)
    read = check_run(config)
    if is_worker(os.environ):
        return be_rank(lambda: _work(config, read, as_json))

    def attempt(config: TrainConfig) -> Attempt:
        arguments = [*as_arguments(config), *(["--json"] if as_json else [])]
        has_meshes = config.shards > 1
        return Attempt(arguments, config.num_processes, config.spares, has_meshes=has_meshes)

    restarts = Restarts(config)

    def go_on(failed: Sequence[Failure]) -> Attempt | None:
        following = restarts.after(failed)
        return None if following is None else attempt(following)

    try:
        return start_ranks(attempt(config), go_on)
    except KeyboardInterrupt:
        saved = saved_steps(Path(config.checkpoint)) if config.checkpoint else []
        if saved:
            print(f"--resume continues from step {saved[-1]}; later ones are lost", file=sys.stderr)
        elif config.checkpoint:
            print(f"no step was saved yet: the first is {config.every} (--every)", file=sys.stderr)
        raise


def as_arguments(config: TrainConfig) -> list[str]:
    """Return the command line of a run."""
    arguments = ["train"]
    for name, value in config.options().items():
        if isinstance(value, bool):
            arguments += [f"--{name}"] if value else []
        elif value not in (None, ""):
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}={each}" for each in values]
    return arguments


def _work(config: TrainConfig, data: Data, is_json: bool) -> None:
    """Run as one of the ranks."""
    is_first = os.environ["RANK"] == "0"
    display = make_display(config, is_json=is_json, is_first=is_first)
    display.begin()
    trained = None
    try:
        from penstock.training.worker import work

        trained = work(config, data, display, is_first=is_first)
    finally:
        display.end(trained)
