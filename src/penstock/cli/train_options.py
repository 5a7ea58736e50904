"""The options of `penstock train`, in the order of its help; None for what is left out.

Their names are those of the fields of `TrainConfig`, which has their defaults.
"""

from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--size",
        metavar="SIZE|FOLDER|MODULE:FUNCTION",
        help="tiny, small (the default), medium, large or xl; a folder or config.json of Hugging "
        "Face; or a function that returns a model.",
    ),
]
Layers: TypeAlias = Annotated[int | None, typer.Option(help="Blocks of the GPT.")]
Width: TypeAlias = Annotated[int | None, typer.Option(help="Numbers per token of the GPT.")]
Heads: TypeAlias = Annotated[int | None, typer.Option(help="Attention heads of the GPT.")]
Context: TypeAlias = Annotated[int | None, typer.Option(help="Tokens in a sequence.")]
Data: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        "--text",
        metavar="PATH|MODULE:FUNCTION",
        help="Text file, folder of .txt files, folder of Hugging Face's datasets, or function; "
        "may be repeated. Python's own library if not given.",
    ),
]
TokenizerFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="tokenizer.json; that of the model's folder, or bytes, if not given."
    ),
]
Ranks: TypeAlias = Annotated[
    int | None, typer.Option("--ranks", "-p", help="Ranks of a pipeline; 2 if not given.")
]
Replicas: TypeAlias = Annotated[
    int | None, typer.Option(help="Pipelines that share each batch, each with a whole model.")
]
Shards: TypeAlias = Annotated[
    int | None, typer.Option(help="Pipelines that share each batch and the parameters, by FSDP2.")
]
ScheduleName: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="NAME|auto|FILE", help="ZB-V if not given; FILE ends in .csv."),
]
StagesPerRank: TypeAlias = Annotated[
    int | None,
    typer.Option("--stages-per-rank", "-v", help="The schedule's own number if not given."),
]
Microbatches: TypeAlias = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Microbatches of a batch; 8 if not given."),
]
Batch: TypeAlias = Annotated[int | None, typer.Option(help="Sequences in a batch; 16 by default.")]
Accumulate: TypeAlias = Annotated[
    int | None, typer.Option(help="Batches whose gradients a step adds up; 1 if not given.")
]
Steps: TypeAlias = Annotated[
    int | None, typer.Option(help="Number of the last step; 200 if not given.")
]
Lr: TypeAlias = Annotated[
    float | None, typer.Option(help="Learning rate of AdamW; 0.001 if not given.")
]
MinLr: TypeAlias = Annotated[
    float | None, typer.Option(help="Learning rate of the last step, by a cosine; constant if not.")
]
Warmup: TypeAlias = Annotated[
    int | None, typer.Option(help="Steps in which the learning rate rises; 0 if not given.")
]
WeightDecay: TypeAlias = Annotated[
    float | None, typer.Option(help="Weight decay of matrices; 0.01 if not given.")
]
Clip: TypeAlias = Annotated[
    float | None, typer.Option(help="Largest norm of the gradients; not clipped if not given.")
]
SkipBadSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Skip steps whose loss or gradients are not finite, and say where that began; stop "
        "after more than N in a row. Not looked for if not given.",
    ),
]
DtypeName: TypeAlias = Annotated[
    str | None, typer.Option(metavar="float32|bfloat16|float64", help="Dtype of the parameters.")
]
AutocastName: TypeAlias = Annotated[
    str | None, typer.Option(metavar="bfloat16", help="Dtype to compute in, of 32-bit parameters.")
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option(help="Seed of weights and batches; 0 if not given.")
]
EvalEvery: TypeAlias = Annotated[
    int | None, typer.Option(help="Steps between evaluations; only at the end if not given.")
]
EvalShare: TypeAlias = Annotated[
    float | None, typer.Option(help="Share of the data to hold out; 0.05 with --eval-every.")
]
EvalData: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH|MODULE:FUNCTION", help="Data to evaluate on, as --data."),
]
EvalBatches: TypeAlias = Annotated[
    int | None, typer.Option(help="Batches of an evaluation, 0 for all; 20 if not given.")
]
EvaluateOnly: TypeAlias = Annotated[
    bool | None, typer.Option("--evaluate-only", help="Evaluate, without training.")
]
Checkpoint: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder for checkpoints.")
]
Every: TypeAlias = Annotated[
    int | None, typer.Option(help="Steps between checkpoints; 100 if not given.")
]
Keep: TypeAlias = Annotated[
    int | None, typer.Option(help="Checkpoints that are kept; 2 if not given.")
]
Resume: TypeAlias = Annotated[
    bool | None, typer.Option("--resume", help="Continue from the last checkpoint in FOLDER.")
]
Restarts: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Times to go on from the last checkpoint after a rank has died; 0 if not."),
]
MinRanks: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Fewest ranks to go on with; dead ones are started again if not given."),
]
Spares: TypeAlias = Annotated[
    int | None, typer.Option(help="Idle processes to take the place of dead ranks; 0 if not given.")
]
SnapshotEvery: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Steps between snapshots in memory, for restarts; none if not given."),
]
Export: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Write the trained model for transformers at the end."),
]
Sample: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Text to continue at the end.")
]
Record: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Record the steps, for penstock show.")
]
Log: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write JSON lines to a file.")
]
TensorboardFolder: TypeAlias = Annotated[
    str | None, typer.Option("--tensorboard", metavar="FOLDER", help="Write for TensorBoard.")
]
WandbProject: TypeAlias = Annotated[
    str | None, typer.Option("--wandb", metavar="PROJECT", help="Log to Weights & Biases.")
]
MemoryCap: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="CAP",
        help="Memory that a rank may use, such as 8GiB; what the machine has free if not given.",
    ),
]
Force: TypeAlias = Annotated[
    bool | None, typer.Option("--force", help="Train even if memory is expected not to suffice.")
]
