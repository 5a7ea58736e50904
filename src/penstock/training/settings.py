"""The settings of a run, and what is wrong with those that cannot be."""

from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from penstock.costs.amounts import to_amount
from penstock.errors import OptionError
from penstock.training.checks import check_amount, check_count
from penstock.training.model_sources import HuggingFaceModel, ModelSource

_LARGEST_SEED = 2**63 - 1
Dtype = Literal["float32", "bfloat16", "float64"]
Autocast = Literal["", "bfloat16"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The config of one run of the trainer, the same on all ranks.

    An option has the name of its field, with hyphens and without "num_"; `model` stands for
    several.
    """

    model: ModelSource
    _: KW_ONLY
    data: tuple[str, ...] = ()
    """Files, folders or a `module:function`; if empty, the source code of Python's own library."""
    tokenizer: str = ""
    """A tokenizer.json; if empty, that of the model's folder, or bytes."""
    num_ranks: int = 2
    """The ranks of each pipeline."""
    replicas: int = 1
    """The pipelines that train on a part of each batch; they hold whole copies."""
    shards: int = 1
    """The pipelines among which parameters are spread by fully_shard."""
    schedule: str = "ZB-V"
    """A name, "auto", or a file that ends in .csv."""
    stages_per_rank: int | None = None
    """None for the schedule's own number."""
    num_microbatches: int = 8
    batch: int = 16
    """The number of sequences in a batch, of all replicas together."""
    accumulate: int = 1
    """The number of batches whose gradients are added up in a step."""
    steps: int = 200
    """The number of the last step, counted from the beginning of the training."""
    lr: float = 0.001
    min_lr: float | None = None
    """The learning rate of the last step, reached by a cosine; None for a constant one."""
    warmup: int = 0
    """The number of steps in which the learning rate rises to `lr`."""
    weight_decay: float = 0.01
    clip: float | None = None
    """The largest norm of the gradients; None to leave them as they are."""
    skip_bad_steps: int | None = None
    """The number of steps in a row that may be skipped because they are not finite; None for none.

    With None, nothing but the loss is looked at.
    """
    dtype: Dtype = "float32"
    """The dtype of the parameters, their gradients and the state of the optimizer."""
    autocast: Autocast = ""
    """The dtype that autocast computes in; if empty, that of the parameters."""
    seed: int = 0
    eval_every: int | None = None
    """The number of steps between evaluations; None for one at the end, if data is held out."""
    eval_share: float = 0.0
    """The share of the data that is held out for evaluation."""
    eval_data: tuple[str, ...] = ()
    """Data to evaluate on, in place of a share."""
    eval_batches: int = 20
    """The number of batches of an evaluation: the first ones that are held out, or all if 0."""
    evaluate_only: bool = False
    checkpoint: str = ""
    """A folder; if empty, nothing is saved."""
    every: int = 100
    """The number of steps between checkpoints; the last step is saved too."""
    keep: int = 2
    """The number of checkpoints that are kept."""
    resume: bool = False
    restarts: int = 0
    """How often the ranks are started again after one has died."""
    min_ranks: int | None = None
    """The fewest ranks to go on with; None to start a rank again in the place of a dead one."""
    spares: int = 0
    """The number of idle processes that wait to take the place of a dead rank."""
    snapshot_every: int | None = None
    """The number of steps between snapshots in memory; None for none."""
    export: str = ""
    """A folder for the trained model, in the format of Hugging Face."""
    sample: str = ""
    """A text to be continued at the end."""
    record: str = ""
    """The file for a recording of the steps, if any."""
    log: str = ""
    """A file for JSON lines, if any."""
    tensorboard: str = ""
    wandb: str = ""
    memory: str = ""
    """The memory that a rank may use, such as 8GiB; if empty, what the machine has free."""
    force: bool = False
    """True to train even if the expected memory is too large."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "batch", "steps", "every"):
            check_count(option_of(name), getattr(self, name))
        for name in ("accumulate", "replicas", "shards", "keep"):
            check_count(name, getattr(self, name))
        check_count("warmup", self.warmup, least=0)
        for name in ("eval_batches", "restarts", "spares"):
            check_count(option_of(name), getattr(self, name), least=0)
        if self.skip_bad_steps is not None:
            check_count("skip-bad-steps", self.skip_bad_steps, least=0)
        for name in ("stages_per_rank", "eval_every", "min_ranks", "snapshot_every"):
            if getattr(self, name) is not None:
                check_count(option_of(name), getattr(self, name))
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise OptionError(f"--seed is {self.seed}. Expected a whole number from 0 to 2^63 - 1.")
        check_amount("lr", self.lr, such_as="0.001")
        check_amount("weight-decay", self.weight_decay, such_as="0.01", may_be_zero=True)
        if self.clip is not None:
            check_amount("clip", self.clip, such_as="1.0")
        if self.memory:
            to_amount("--memory", self.memory)
        self._check_rates()
        self._check_words()
        self._check_batch()
        self._check_evaluation()
        self._check_restarts()

    def _check_rates(self) -> None:
        if self.min_lr is not None:
            check_amount("min-lr", self.min_lr, such_as="0.0001", may_be_zero=True)
            if self.min_lr > self.lr:
                raise OptionError(
                    f"--min-lr is {self.min_lr}, which is more than --lr, {self.lr}. Expected the "
                    "learning rate of the last step, such as a tenth of --lr."
                )
        if self.warmup >= self.steps:
            raise OptionError(
                f"--warmup is {self.warmup}, but --steps is {self.steps}, so --lr would never be "
                "reached. Expected fewer steps."
            )

    def _check_words(self) -> None:
        for name, known in (("dtype", get_args(Dtype)), ("autocast", get_args(Autocast))):
            value = getattr(self, name)
            if value not in known:
                words = ", ".join(word for word in known if word)
                raise OptionError(f"--{name} is {value!r}. Expected {words}.")
        if self.autocast and self.dtype != "float32":
            raise OptionError(
                f"--autocast is {self.autocast} and --dtype {self.dtype}. Autocast is for "
                "parameters of 32 bits: give one of the two."
            )

    def _check_batch(self) -> None:
        pipelines = self.num_pipelines
        if self.batch % (self.num_microbatches * pipelines):
            of_each = f" on each of {pipelines} pipelines" if pipelines > 1 else ""
            times = " times --replicas times --shards" if pipelines > 1 else ""
            raise OptionError(
                f"--batch is {self.batch}, which cannot be cut into {self.num_microbatches} equal "
                f"microbatches{of_each}. Expected a multiple of --microbatches{times}."
            )
        if self.resume and not self.checkpoint:
            raise OptionError(
                "--resume is given without --checkpoint. Name the folder of the training to resume."
            )

    def _check_evaluation(self) -> None:
        if not 0 <= self.eval_share < 1:
            raise OptionError(
                f"--eval-share is {self.eval_share}. Expected a share of the data from 0 to below "
                "1, such as 0.05."
            )
        if self.eval_share and self.eval_data:
            raise OptionError(
                "--eval-share and --eval-data are both given. Give one: a share of --data, or "
                "other data."
            )
        if (self.eval_every or self.evaluate_only) and not self.has_evaluation:
            raise OptionError("there is nothing to evaluate on. Give --eval-share, or --eval-data.")

    def _check_restarts(self) -> None:
        if self.restarts and not self.checkpoint and not self.snapshot_every:
            raise OptionError(
                f"--restarts is {self.restarts} without --checkpoint, so a restart would lose all "
                "steps. Name a folder for checkpoints, or give --snapshot-every."
            )
        if self.snapshot_every and self.shards > 1 and self.min_ranks is not None:
            raise OptionError(
                f"--snapshot-every is {self.snapshot_every}, --shards {self.shards} and "
                f"--min-ranks {self.min_ranks}, but snapshots of shards fit the same number of "
                "ranks alone. Leave out --min-ranks, or --snapshot-every."
            )
        for name in ("min_ranks", "spares"):
            if getattr(self, name) and not self.restarts:
                raise OptionError(
                    f"--{option_of(name)} is {getattr(self, name)} without --restarts, so it would "
                    "never be used. Give the number of --restarts, such as 3."
                )
        if self.min_ranks is None:
            return
        if self.min_ranks > self.num_ranks:
            raise OptionError(
                f"--min-ranks is {self.min_ranks}, but --ranks is {self.num_ranks}. Expected at "
                "most that number."
            )
        if self.schedule.lower().endswith(".csv") and self.min_ranks < self.num_ranks:
            raise OptionError(
                f"--min-ranks is {self.min_ranks}, but the schedule in {self.schedule} is for "
                f"{self.num_ranks} ranks. Leave --min-ranks out, or give the name of a --schedule."
            )

    @property
    def context(self) -> int:
        """The number of tokens in a sequence."""
        return self.model.context

    @property
    def tokenizer_file(self) -> Path | None:
        """The file that says what tokens are; None for bytes."""
        if self.tokenizer:
            return Path(self.tokenizer)
        return self.model.tokenizer_file if isinstance(self.model, HuggingFaceModel) else None

    @property
    def num_pipelines(self) -> int:
        return self.replicas * self.shards

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_pipelines

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate * self.context

    @property
    def has_evaluation(self) -> bool:
        return bool(self.eval_share or self.eval_data)

    def options(self) -> dict[str, Any]:
        """Return all options, by their names, as JSON and command lines can hold them."""
        found: dict[str, Any] = dict(self.model.options())
        for field in fields(self):
            if field.name != "model":
                value = getattr(self, field.name)
                if field.name in _PATHS:
                    value = [_absolute(path) for path in value]
                found[option_of(field.name)] = list(value) if isinstance(value, tuple) else value
        return found


_PATHS: Final = ("data", "eval_data")


def option_of(field: str) -> str:
    """Return the name of an option, as it is typed, from that of its field."""
    return field.removeprefix("num_").replace("_", "-")


def _absolute(path: str) -> str:
    """Return a path that means the same in another folder; a `module:function` stays as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path
