"""Warn once per process if torch is not the version that Penstock is tested with.

The parts of Penstock that load torch import this module first, so the warning comes before
anything that another version of torch could break.
"""

import warnings

import torch

TESTED = "2.13"
"""The version of torch that all tests run with; its patch releases count as the same."""
REQUIREMENT = "torch>=2.13,<2.14"
"""The requirement in pyproject.toml."""


def is_tested(version: str) -> bool:
    """Return whether `version`, such as `2.13.0+cpu`, is the tested one or a patch of it."""
    return version.partition("+")[0].split(".")[:2] == TESTED.split(".")


if not is_tested(torch.__version__):
    warnings.warn(
        f"Found torch {torch.__version__}, but Penstock is tested with torch {TESTED} only, and "
        "relies on parts of torch that change between versions. "
        f'Install the tested version with: pip install "{REQUIREMENT}". '
        "If you keep this one, compare gradients with those of the whole model first.",
        UserWarning,
        stacklevel=1,
    )
