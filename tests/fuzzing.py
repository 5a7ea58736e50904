"""How many random examples a test draws: some in `make test`, many in `make fuzz`."""

import os

from hypothesis import settings

IS_LONG = os.environ.get("PENSTOCK_FUZZ") == "1"


def examples(usual: int, *, long: int) -> settings:
    """Decorates a hypothesis test that draws `usual` examples, the same each time, or `long` ones.

    A long run is there to find what the usual examples do not: it draws new ones.
    """
    return settings(
        max_examples=long if IS_LONG else usual,
        derandomize=not IS_LONG,
        print_blob=True,
    )
