"""The settings of a run: the model's size, and the options of the trainer."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Final

from penstock.errors import OptionError

VOCABULARY: Final = 256  # Every byte is a token.
_LARGEST_SEED = 2**63 - 1
_LARGEST_SCHEDULE = 200_000


def check_count(name: str, value: int) -> None:
    """Raise an error unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise OptionError(f"--{name} is {value!r}. Expected a whole number, at least 1.")


def check_size(num_ranks: int, num_microbatches: int) -> None:
    """Raise an error if a schedule would have too many actions to make or draw."""
    if num_ranks * num_microbatches > _LARGEST_SCHEDULE:
        raise OptionError(
            f"--ranks is {num_ranks} and --microbatches {num_microbatches}. Expected a product of "
            f"at most {_LARGEST_SCHEDULE:,}: a larger schedule takes minutes, and gigabytes."
        )


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The size of a GPT that reads bytes."""

    num_layers: int
    width: int
    num_heads: int
    context: int
    """The number of tokens that it reads at a time."""

    def __post_init__(self) -> None:
        check_count("layers", self.num_layers)
        check_count("width", self.width)
        check_count("heads", self.num_heads)
        check_count("context", self.context)
        if self.width % self.num_heads:
            raise OptionError(
                f"--width is {self.width}, which cannot be divided evenly among {self.num_heads} "
                "heads. Expected a multiple of --heads."
            )

    @property
    def num_parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        around = (2 * VOCABULARY + self.context + 2) * self.width
        return self.num_layers * block + around

    @property
    def max_stages(self) -> int:
        """The most stages, with the embedding and the head as stages of their own."""
        return self.num_layers + 2


SIZES: Final = {
    "tiny": GptConfig(num_layers=4, width=64, num_heads=4, context=64),
    "small": GptConfig(num_layers=8, width=128, num_heads=4, context=128),
    "medium": GptConfig(num_layers=12, width=384, num_heads=6, context=256),
    "large": GptConfig(num_layers=24, width=1024, num_heads=16, context=512),
    "xl": GptConfig(num_layers=48, width=1600, num_heads=25, context=1024),
}
"""The sizes by name: 0.2, 1.7, 21.6, 303.4 and 1478 million parameters."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The config of one run of the trainer, the same on all ranks."""

    model: GptConfig
    _: KW_ONLY
    text: str = ""
    """A file; if empty, the source code of Python's own library."""
    num_ranks: int = 2
    schedule: str = "ZB-V"
    """A name, "auto", or a file that ends in .csv."""
    stages_per_rank: int | None = None
    """None for the schedule's own number."""
    num_microbatches: int = 8
    batch: int = 16
    """The number of sequences in a step."""
    steps: int = 200
    """The number of the last step, counted from the beginning of the training."""
    lr: float = 0.001
    seed: int = 0
    checkpoint: str = ""
    """A folder; if empty, nothing is saved."""
    every: int = 100
    """The number of steps between checkpoints; the last step is saved too."""
    resume: bool = False
    record: str = ""
    """The file for a recording of the steps, if any."""

    def __post_init__(self) -> None:
        check_count("ranks", self.num_ranks)
        check_count("microbatches", self.num_microbatches)
        check_count("batch", self.batch)
        check_count("steps", self.steps)
        check_count("every", self.every)
        if self.stages_per_rank is not None:
            check_count("stages-per-rank", self.stages_per_rank)
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise OptionError(f"--seed is {self.seed}. Expected a whole number from 0 to 2^63 - 1.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"--lr is {self.lr}. Expected a number above 0, such as 0.001.")
        if self.batch % self.num_microbatches:
            raise OptionError(
                f"--batch is {self.batch}, which cannot be cut into {self.num_microbatches} equal "
                "microbatches. Expected a multiple of --microbatches."
            )
        if self.resume and not self.checkpoint:
            raise OptionError(
                "--resume is given without --checkpoint. Name the folder of the training to resume."
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context
