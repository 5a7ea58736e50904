"""What `import penstock` gives, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from imports import SOURCE_FILES, imported_names, imported_names_of_file, is_inside, name_file

ALL_NAMES = [*penstock._OWN_NAMES, *penstock._ROOMS, *penstock._DROP_IN_NAMES]


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
    name = "local_ranks"
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


def test_type_checkers_see_each_name_from_its_room() -> None:
    names = imported_names(Path(penstock.__file__).read_text(), "penstock")
    expected = {
        *(f"penstock.{room}.{name}" for name, room in penstock._OWN_NAMES.items()),
        *(f"penstock.{room}" for room in penstock._ROOMS),
        *(f"penstock.compat.{name}" for name in penstock._DROP_IN_NAMES),
    }
    assert expected == set(names) - {"importlib.import_module", "typing.TYPE_CHECKING"}


def test_public_names_resolve_and_are_documented_and_listed() -> None:
    for name in ALL_NAMES:
        assert getattr(penstock, name).__doc__, name
        assert name in dir(penstock)
    assert {"__version__", *penstock._OWN_NAMES} == set(penstock.__all__)


def test_a_user_needs_about_thirty_names() -> None:
    assert len(penstock.__all__) <= 34


def test_names_of_torch_are_those_of_compat() -> None:
    theirs = set(penstock.compat.__all__)
    assert theirs == {*penstock._DROP_IN_NAMES, "PipelineStage"}
    assert penstock.Schedule1F1B is penstock.compat.Schedule1F1B


def test_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'turbine'"):
        _ = penstock.turbine


def test_source_does_not_import_torch_pipelining() -> None:
    for path in SOURCE_FILES:
        names = imported_names_of_file(path)
        theirs = [name for name in names if is_inside(name, "torch.distributed.pipelining")]
        assert [] == theirs, name_file(path)


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


def test_split_backward_of_plain_modules_does_not_load_dtensors() -> None:
    words = run_python(
        "import sys, torch, penstock\n"
        "from penstock.backward import SplitEngine\n"
        "x = torch.ones(3, 2, requires_grad=True)\n"
        "SplitEngine(torch.nn.Linear(2, 2)).forward(x).backward(torch.ones(3, 2))\n"
        "print(*(name for name in sys.modules if name.startswith('torch.distributed.tensor')))"
    )
    assert [] == words
