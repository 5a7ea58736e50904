"""What `import penstock` gives, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from imports import SOURCE_FILES, imported_names, imported_names_of_file, is_inside, name_file

LAZY_NAMES = penstock._LAZY_NAMES


def run_python(code: str) -> list[str]:
    """The words that `code` prints in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_import_loads_nothing_but_penstock_and_the_standard_library() -> None:
    # The startup time follows from this, and unlike a time it is the same on every machine.
    loaded = run_python(
        "import sys; before = set(sys.modules); import penstock; print(*set(sys.modules) - before)"
    )
    roots = {name.partition(".")[0] for name in loaded}
    assert set() == roots - {"penstock"} - sys.stdlib_module_names


def test_torch_is_loaded_by_the_first_use_of_a_name_that_needs_it() -> None:
    name = "stage_backward"
    words = run_python(
        "import sys, penstock\n"
        "print('torch' in sys.modules)\n"
        f"print(penstock.{name}.__name__, '{name}' in vars(penstock))\n"
        "print('torch' in sys.modules)"
    )
    assert ["False", name, "True", "True"] == words


def test_planning_side_works_without_torch() -> None:
    words = run_python(
        "import sys, penstock\n"
        "make = penstock.schedules.get('zb-v')\n"
        "schedule = make(num_ranks=2, num_microbatches=4)\n"
        "schedule.verify()\n"
        "print(penstock.simulate(schedule).bubble_by_span, 'torch' in sys.modules)"
    )
    assert ["0.0", "False"] == words


def test_type_checkers_see_each_lazy_name_from_its_module() -> None:
    names = imported_names(Path(penstock.__file__).read_text(), "penstock")
    for_type_checkers = {name for name in names if not is_inside(name, "penstock.errors")}
    expected = {f"{module}.{name}" for name, module in LAZY_NAMES.items()}
    assert expected == for_type_checkers - {"importlib.import_module", "typing.TYPE_CHECKING"}


@pytest.mark.parametrize("name", sorted(set(penstock.__all__) - {"__version__"}))
def test_public_name_resolves_and_is_documented_and_listed(name: str) -> None:
    assert getattr(penstock, name).__doc__
    assert name in dir(penstock)


def test_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'turbine'"):
        _ = penstock.turbine


@pytest.mark.parametrize("path", SOURCE_FILES, ids=name_file)
def test_source_does_not_import_torch_pipelining(path: Path) -> None:
    names = imported_names_of_file(path)
    assert [] == [name for name in names if is_inside(name, "torch.distributed.pipelining")]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.pipelining as pp",
        "from torch.distributed import pipelining",
        "def f():\n    from torch.distributed.pipelining._backward import stage_backward",
    ],
)
def test_import_of_torch_pipelining_would_be_found(source: str) -> None:
    [name] = imported_names(source, "penstock")
    assert is_inside(name, "torch.distributed.pipelining")
