"""The folders are the architecture: a module imports only from folders above its own."""

from pathlib import Path

import pytest

from imports import SOURCE_FILES, SRC, imported_names, imported_names_of_file, is_inside, name_file

# In order: each may import from those before it. `errors` is first, so all may import it.
WITHOUT_TORCH = (
    "errors",
    "sealed",
    "ir",
    "costs",
    "schedules",
    "passes",
    "timeline",
    "sim",
    "solver",
    "partition",
    "draw",
    "studio",
)
WITH_TORCH = (
    "torch_version",
    "backward",
    "comm",
    "microbatches",
    "stage",
    "runtime",
    "compat",
    "cutting",
    "planning",
    "training",
    "cli",
    "__main__",
)
LAYERS = WITHOUT_TORCH + WITH_TORCH

# Ways in that users expect where they hold a value; imported when called. Each breaks the order,
# so each is here by name.
FRONT_DOORS = {
    ("penstock/ir/schedule.py", "penstock.passes.verification.verify"),  # schedule.verify()
    ("penstock/ir/schedule.py", "penstock.costs.footprint.Footprint"),
    # recording.simulated()
    ("penstock/timeline/recording.py", "penstock.sim.simulator.simulate"),
}

FILES_IN_LAYERS = [path for path in SOURCE_FILES if path != SRC / "penstock" / "__init__.py"]


def find_faults(layer: str, names: list[str]) -> list[str]:
    """What is wrong with a module of `layer` that imports `names`."""
    if layer not in LAYERS:
        return [
            f"penstock.{layer} is in no layer: "
            "add it at its place in WITHOUT_TORCH or WITH_TORCH of tests/test_layers.py"
        ]
    faults = [_find_fault(layer, name) for name in names]
    return [fault for fault in faults if fault]


def _find_fault(layer: str, name: str) -> str:
    if is_inside(name, "torch") and layer in WITHOUT_TORCH:
        return f"{layer} imports {name}, but may not import torch"
    if not is_inside(name, "penstock"):
        return ""
    target = name.split(".")[1] if "." in name else ""
    if target not in LAYERS:
        return f"{layer} imports {name}, which is no layer: import it from where it is defined"
    if LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer} imports {name}, but {target} comes after {layer}"
    return ""


@pytest.mark.parametrize("path", FILES_IN_LAYERS, ids=name_file)
def test_module_imports_only_from_the_layers_before_its_own(path: Path) -> None:
    layer = path.relative_to(SRC / "penstock").parts[0].removesuffix(".py")
    names = [
        name for name in imported_names_of_file(path) if (name_file(path), name) not in FRONT_DOORS
    ]
    assert [] == find_faults(layer, names)


@pytest.mark.parametrize(("file", "name"), sorted(FRONT_DOORS))
def test_front_door_is_in_use(file: str, name: str) -> None:
    assert name in imported_names_of_file(SRC / file)


ALLOWED = [
    ("sim", "from penstock.ir.action import Action"),
    ("sim", "from penstock import ir, errors"),
    ("sim", "from .cost import CostTable"),
    ("sim", "from ..ir import action"),
    ("sim", "import json, numpy as np"),
    ("backward", "import torch"),
    ("backward", "from penstock.errors import BackwardError"),
    ("runtime", "from penstock.stage import PipelineStage"),
    ("ir", "import torchlike, penstockish"),
]

FORBIDDEN = [
    ("ir", "from penstock.sim import engine", "sim comes after ir"),
    ("ir", "import penstock.sim.engine as engine", "sim comes after ir"),
    ("ir", "from penstock import sim", "sim comes after ir"),
    ("ir", "from .. import sim", "sim comes after ir"),
    ("ir", "from ..sim.engine import run", "sim comes after ir"),
    ("ir", "def f():\n    from penstock.sim import engine", "sim comes after ir"),
    ("ir", "if True:\n    import os, penstock.sim", "sim comes after ir"),
    ("stage", "from penstock.runtime import executor", "runtime comes after stage"),
    ("errors", "from penstock.ir import action", "ir comes after errors"),
    ("draw", "import torch", "may not import torch"),
    ("draw", "from torch.nn import Module", "may not import torch"),
    ("draw", "def f():\n    import torch.nn as nn", "may not import torch"),
    ("cli", "import penstock", "penstock, which is no layer"),
    ("cli", "from penstock import stage_backward", "stage_backward, which is no layer"),
    ("cli", "from penstock import *", "which is no layer"),
]


@pytest.mark.parametrize(("layer", "source"), ALLOWED)
def test_import_from_an_earlier_layer_is_allowed(layer: str, source: str) -> None:
    assert [] == find_faults(layer, imported_names(source, f"penstock.{layer}"))


@pytest.mark.parametrize(("layer", "source", "fault"), FORBIDDEN)
def test_import_against_the_layers_is_found(layer: str, source: str, fault: str) -> None:
    [found] = find_faults(layer, imported_names(source, f"penstock.{layer}"))
    assert fault in found


def test_folder_that_is_not_in_the_list_is_found_and_the_message_says_where_to_add_it() -> None:
    [found] = find_faults("turbine", [])
    assert "penstock.turbine is in no layer: add it at its place" in found
