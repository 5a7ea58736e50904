"""The lengths of microbatches that `--lengths` and `--work` give."""

from typing import NamedTuple

from penstock.costs import Work
from penstock.costs.amounts import to_counts
from penstock.costs.given_costs import GivenCosts
from penstock.costs.lengths import to_work
from penstock.errors import OptionError


class LengthsOption(NamedTuple):
    """The tokens of each microbatch, if they are given, and the work that they take."""

    lengths: list[int] | None
    work: Work

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches; None if no lengths are given."""
        return None if self.lengths is None else len(self.lengths)

    def apply(self, costs: GivenCosts) -> GivenCosts:
        """Return the costs for these lengths; those given are of a microbatch of mean length."""
        if self.lengths is None:
            return costs
        if costs.num_microbatches is not None:
            raise OptionError(
                f"--lengths were given, but the costs have scales for {costs.num_microbatches} "
                "microbatches already. Leave --lengths out, or give costs without scales."
            )
        return costs.for_lengths(self.lengths, self.work)


def read_lengths(lengths: str | None, work: str | None) -> LengthsOption:
    """Return the lengths and the rule of work that the options give."""
    if work is not None and lengths is None:
        raise OptionError(f"--work is {work}, but there are no lengths. Give --lengths too.")
    return LengthsOption(
        to_counts("--lengths", lengths), Work() if work is None else to_work("--work", work)
    )
