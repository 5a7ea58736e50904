"""Warn once per process if torch is not a version that Penstock is tested with.

The parts of Penstock that load torch import this module first, so the warning comes before
anything that another version of torch could break.
"""

import warnings

import torch

TESTED = ("2.13", "2.14", "2.15")
"""The versions of torch that all tests have run with; a patch release counts as its version."""
REQUIREMENT = "torch>=2.13,<2.16"
"""The requirement in pyproject.toml."""


def is_tested(version: str) -> bool:
    """Return whether `version`, such as `2.13.0+cpu`, is a tested one or a patch of it."""
    return ".".join(version.partition("+")[0].split(".")[:2]) in TESTED


def is_before(major: int, minor: int) -> bool:
    """Return whether torch is older than this version. Only `torch_private` may ask."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)


def versions_tested() -> str:
    """Return the tested versions as a message says them: `2.13, 2.14 or 2.15`."""
    return f"{', '.join(TESTED[:-1])} or {TESTED[-1]}"


if not is_tested(torch.__version__):
    warnings.warn(
        f"Found torch {torch.__version__}, but Penstock is tested with torch {versions_tested()} "
        "only, and relies on parts of torch that change between versions. "
        f'Install a tested version with: pip install "{REQUIREMENT}". '
        "If you keep this one, compare gradients with those of the whole model first.",
        UserWarning,
        stacklevel=1,
    )
