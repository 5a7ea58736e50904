"""What only some need is an extra, and where it is missing it is named."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from imports import SOURCE_FILES, SRC, imported_names_of_file
from limits import PROCESS_S
from penstock.errors import OptionError, TorchError
from penstock.extras import needed_by

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

# The packages that files of a room may import, besides torch and the standard library.
ALLOWED = {
    "cli": {"matplotlib", "rich", "typer"},
    "draw": {"matplotlib", "rich"},
    "parallel": {"peft", "safetensors", "transformers"},
    "solver": {"ortools"},
    "studio": {"anyio", "starlette", "uvicorn"},
}


def packages_of(extra: str) -> set[str]:
    """All packages that an extra installs, by way of other extras too."""
    found = set()
    for requirement in EXTRAS[extra]:
        name, _, inner = requirement.partition("[")
        if name == "penstock":
            found |= {package for other in inner[:-1].split(",") for package in packages_of(other)}
        else:
            found.add(re.split("[<>=]", name)[0])
    return found


def test_install_without_extras_brings_torch_and_numpy() -> None:
    assert ["numpy", "torch"] == [re.split("[<>=]", name)[0] for name in PROJECT["dependencies"]]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("cli", {"rich", "typer"}),
        ("draw", {"matplotlib", "rich"}),
        ("exact", {"ortools"}),
        ("hf", {"peft", "safetensors", "transformers"}),
        ("studio", {"anyio", "matplotlib", "rich", "starlette", "typer", "uvicorn"}),
    ],
)
def test_extra_has_what_it_is_for(extra: str, expected: set[str]) -> None:
    assert expected == packages_of(extra)
    assert expected <= packages_of("all") <= packages_of("dev")


def test_extra_of_the_trainer_is_not_a_part_of_all() -> None:
    own = {"datasets", "pyyaml", "tensorboard", "tokenizers"}
    assert own | packages_of("cli") | packages_of("hf") == packages_of("train")
    assert own.isdisjoint(packages_of("all"))


def test_extra_of_replicas_is_not_a_part_of_all() -> None:
    assert {"torchft"} == packages_of("replicas")
    assert {"torchft"}.isdisjoint(packages_of("all"))
    assert {"torchft"} <= packages_of("dev")


def test_files_import_only_packages_that_an_extra_has() -> None:
    wrong = []
    for path in SOURCE_FILES:
        room = path.relative_to(SRC / "penstock").parts[0]
        known = {"penstock", "torch", "numpy", *ALLOWED.get(room, ()), *sys.stdlib_module_names}
        roots = {name.partition(".")[0] for name in imported_names_of_file(path)}
        wrong += [f"{path.name} imports {root}" for root in roots - known]
    assert [] == wrong
    assert packages_of("all") == set.union(*ALLOWED.values())


def run_without(packages: Sequence[str], code: str) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a process in which these packages are not installed."""
    blocked = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {list(packages)!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + code],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )


@pytest.mark.parametrize("missing", [["typer"], ["rich"], ["typer", "rich"]], ids=" ".join)
@pytest.mark.parametrize("args", [[], ["--help"], ["list"]], ids=str)
def test_command_line_without_its_packages_says_how_to_get_them(
    missing: list[str], args: list[str]
) -> None:
    done = run_without(missing, f"from penstock.cli import main\nmain({args})")
    expected = "error: the command line needs typer and rich: pip install 'penstock[cli]'\n"
    assert (1, "", expected) == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("missing", "args", "expected"),
    [
        (package, ["studio"], "the studio needs anyio, starlette and uvicorn: penstock[studio]")
        for package in ("anyio", "starlette", "uvicorn")
    ]
    + [
        ("matplotlib", ["demo"], "the demo needs matplotlib: penstock[cli,draw]"),
        (
            "matplotlib",
            ["show", "1F1B", "-o", "a.svg"],
            "A picture needs matplotlib: penstock[draw]",
        ),
        (
            "matplotlib",
            ["show", "1F1B", "-o", "a.png"],
            "A picture needs matplotlib: penstock[draw]",
        ),
    ],
)
def test_command_without_its_packages_says_how_to_get_them(
    missing: str, args: list[str], expected: str, tmp_path: Path
) -> None:
    code = f"import os\nos.chdir({str(tmp_path)!r})\nfrom penstock.cli import main\nmain({args})"
    done = run_without([missing], code)
    remedy = re.sub(r"(penstock\[.*\])", r"pip install '\1'", expected)
    assert (1, "", f"error: {remedy}\n") == (done.returncode, done.stdout, done.stderr)


DRAWING = (
    "import penstock\n"
    "from penstock import draw\n"
    "schedule = penstock.schedules.get('1F1B')(num_ranks=2, num_microbatches=2)\n"
    "panels = [draw.Panel('1F1B', penstock.simulate(schedule))]\n"
)
ALL_OPTIONAL = sorted(packages_of("all"))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("draw.show(panels)", "DrawError: Drawing in the terminal needs rich: penstock[draw]"),
        ("draw.save(panels, 'a.svg')", "DrawError: A picture needs matplotlib: penstock[draw]"),
        ("draw.save(panels, 'a.PNG')", "DrawError: A picture needs matplotlib: penstock[draw]"),
        (
            "from penstock.draw.curves import loss_curves; loss_curves({'a': [1.0]}, 'a.svg')",
            "DrawError: A picture needs matplotlib: penstock[draw]",
        ),
        (
            "from penstock.solver.exact import solve\n"
            "solve(penstock.CostTable.uniform(1), penstock.Placement.linear(1), 1)",
            "ScheduleError: The exact solver needs ortools: penstock[exact]",
        ),
    ],
)
def test_call_without_its_packages_says_how_to_get_them(
    call: str, expected: str, tmp_path: Path
) -> None:
    done = run_without(ALL_OPTIONAL, f"import os\nos.chdir({str(tmp_path)!r})\n{DRAWING}{call}")
    remedy = re.sub(r"(penstock\[.*\])", r"pip install '\1'", expected)
    assert f"penstock.errors.{remedy}" == done.stderr.splitlines()[-1]
    assert [] == list(tmp_path.iterdir())


def test_library_works_without_any_extra(tmp_path: Path) -> None:
    code = (
        f"{DRAWING}"
        f"draw.save(panels, {str(tmp_path / 'a.html')!r})\n"
        f"draw.save(panels, {str(tmp_path / 'a.json')!r})\n"
        "found = penstock.search(penstock.CostTable.uniform(2), num_ranks=2, num_microbatches=2)\n"
        "print(schedule, found.report.makespan > 0)\n"
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "pipe = penstock.cut_between_modules(model, 2)\n"
        "def run(group):\n"
        "    stage = pipe.build_stage(group.rank, 'cpu', group)\n"
        "    loss_fn = nn.functional.mse_loss\n"
        "    pipeline = penstock.Pipeline(stage, schedule, loss_fn=loss_fn, record=True)\n"
        "    x = torch.ones(4, 4)\n"
        "    pipeline.step(*([x] if group.rank == 0 else []), target=x)\n"
        "    return model[group.rank].weight.grad is not None\n"
        "print(penstock.local_ranks(2, run))\n"
    )
    done = run_without(ALL_OPTIONAL, code)
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.endswith("True\n[True, True]\n")
    assert ["a.html", "a.json"] == sorted(path.name for path in tmp_path.iterdir())


def test_package_that_is_broken_is_not_called_missing_alone() -> None:
    message = (
        "the tool needs hammer and nail: pip install 'penstock[tool]' "
        "(the import failed: libnail.so: no such file)"
    )
    with (
        pytest.raises(OptionError, match=f"^{re.escape(message)}$") as caught,
        needed_by("the tool", ["hammer", "nail"], extra="tool", error=OptionError),
    ):
        raise ImportError("libnail.so: no such file", name="nail")
    assert isinstance(caught.value.__cause__, ImportError)


def test_error_of_our_own_while_importing_stays_as_it_is() -> None:
    with (
        pytest.raises(TorchError, match="no such torch"),
        needed_by("the tool", ["hammer"], extra="tool", error=OptionError),
    ):
        raise TorchError("no such torch")
