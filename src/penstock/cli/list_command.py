"""`penstock list`: list the schedules that have a name."""

from penstock.cli.options import AsJson
from penstock.cli.screen import print_json, print_table
from penstock.schedules import REGISTRY
from penstock.schedules.generator import Generator, Shape
from penstock.solver.placement_choices import describe


def list_schedules(as_json: AsJson = False) -> None:
    """List the schedules that have a name.

    Case, hyphens and blanks in names do not matter; the names of torch's classes work too.

    \b
    penstock list
    penstock list --json
    """
    if as_json:
        print_json([_facts(generator) for generator in REGISTRY])
        return
    header = ("schedule", "stages per rank", "placement", "from")
    rows = [
        (
            generator.name,
            "any" if generator.takes_any_stages_per_rank else str(generator.stages_per_rank),
            _placement(generator),
            generator.source.partition(";")[0],
        )
        for generator in REGISTRY
    ]
    print_table(header, rows, words=header)


def _facts(generator: Generator) -> dict[str, object]:
    return {
        "name": generator.name,
        "aliases": generator.aliases,
        "source": generator.source,
        "placement": _placement(generator),
        "stages_per_rank": generator.stages_per_rank,
        "takes_any_stages_per_rank": generator.takes_any_stages_per_rank,
    }


def _placement(generator: Generator) -> str:
    """Return the placement in a word; with three ranks, a loop and a V differ."""
    stages_per_rank = 2 if generator.takes_any_stages_per_rank else generator.stages_per_rank
    return describe(generator.placement(Shape(3, 1, stages_per_rank))).partition(",")[0]
