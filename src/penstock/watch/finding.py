"""What the watch found out: a rank that is dead, or as good as dead."""

from dataclasses import dataclass
from typing import Any

ENDED = "ended with exit status"
"""Begins what is wrong with a rank that ended by an error of its own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank of the world that no other rank should wait for any longer."""

    rank: int
    host: str
    stages: str
    """The stages it holds, in words; empty if it holds none."""
    how: str
    """What is wrong with it: a verb and what follows."""
    place: str
    """Where it was, in words that follow a verb."""

    @classmethod
    def of(cls, message: Any) -> "Finding":
        """Read what `as_message` returns; raise a ConnectionError if it is something else."""
        try:
            found = cls(**message)
        except TypeError:
            raise ConnectionError("a finding lacks a part") from None
        texts = found.host, found.stages, found.how, found.place
        if type(found.rank) is not int or not all(type(text) is str for text in texts):
            raise ConnectionError("a finding has a part of another type")
        return found

    @property
    def has_ended_itself(self) -> bool:
        """True if the process ended by an error of its own, and so its host is there."""
        return self.how.startswith(ENDED)

    def as_message(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        where = f"host {self.host}, {self.stages}" if self.stages else f"host {self.host}"
        return f"rank {self.rank} ({where}) {self.how}, {self.place}"
