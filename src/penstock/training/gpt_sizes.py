"""The sizes of the GPT that comes with Penstock."""

from dataclasses import dataclass
from typing import Final

from penstock.errors import OptionError
from penstock.training.checks import check_count

VOCABULARY: Final = 256  # Every byte is a token.


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

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def options(self) -> dict[str, str | int]:
        """Return the options that stand for this model."""
        return {
            "layers": self.num_layers,
            "width": self.width,
            "heads": self.num_heads,
            "context": self.context,
        }

    def __str__(self) -> str:
        return f"{self.num_parameters:,} parameters ({self.num_layers} layers)"


SIZES: Final = {
    "tiny": GptConfig(num_layers=4, width=64, num_heads=4, context=64),
    "small": GptConfig(num_layers=8, width=128, num_heads=4, context=128),
    "medium": GptConfig(num_layers=12, width=384, num_heads=6, context=256),
    "large": GptConfig(num_layers=24, width=1024, num_heads=16, context=512),
    "xl": GptConfig(num_layers=48, width=1600, num_heads=25, context=1024),
}
"""The sizes by name: 0.2, 1.7, 21.6, 303.4 and 1478 million parameters."""
