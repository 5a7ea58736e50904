"""The shapes on which every algorithm is tested: those around which algorithms change."""

from fuzzing import IS_LONG
from penstock.schedules import Generator, Shape
from shapes import shapes

RANKS = range(1, 17) if IS_LONG else range(1, 6)
STAGES_PER_RANK = (1, 2, 3, 4) if IS_LONG else (1, 2, 3)


def microbatches(p: int) -> list[int]:
    """Fewer than ranks, as many, next to a multiple of them; all up to 32 in `make fuzz`."""
    if IS_LONG:
        return list(range(1, 33))
    return sorted({m for m in (1, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 3 * p + 1) if m})


def telling_shapes(generator: Generator) -> list[Shape]:
    """Those that `generator` takes, of each number of ranks."""
    found = []
    for p in RANKS:
        taken = shapes(
            generator, ranks=[p], microbatches=microbatches(p), stages_per_rank=STAGES_PER_RANK
        )
        assert taken, p
        found += taken
    return found
