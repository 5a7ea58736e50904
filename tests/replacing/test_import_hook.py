"""The hook that replaces torch.distributed.pipelining, each time in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from limits import PROCESS_S
from penstock.replacing.import_hook import startup_folder

REPLACED = "penstock: torch.distributed.pipelining is Penstock's in this process (penstock.compat)"


def run_python(
    code: str, *, folders: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    entries = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, entries))} | environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )


NAMES = """
import torch.distributed.pipelining as package
import torch.distributed.pipelining.stage as stage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed import pipelining
print(package.__name__, stage.__name__, _PipelineSchedule.__module__, pipelining is package)
"""


def test_install_replaces_the_package_and_its_modules() -> None:
    done = run_python(
        f"import penstock.compat; penstock.compat.install(); {NAMES}".replace("; \n", "\n")
    )
    assert (
        "penstock.compat penstock.compat.stage penstock.compat.schedule_base True"
        == done.stdout.strip()
    ), done.stderr
    assert REPLACED == done.stderr.strip()


def test_startup_folder_replaces_it_in_a_program_that_knows_nothing() -> None:
    done = run_python(NAMES, folders=(startup_folder(),))
    assert done.stdout.startswith("penstock.compat penstock.compat.stage"), done.stderr
    assert REPLACED == done.stderr.strip()


def test_python_without_penstock_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").touch()
    done = run_python("print('ran')", folders=(startup_folder(), tmp_path))
    assert "ran\n" == done.stdout
    assert "penstock: " in done.stderr
    assert "stays torch's own in this process. Install Penstock for this Python." in done.stderr


def test_only_the_first_rank_says_so() -> None:
    done = run_python(NAMES, folders=(startup_folder(),), RANK="1")
    assert done.stdout.startswith("penstock.compat")
    assert "" == done.stderr


def test_startup_loads_no_torch() -> None:
    done = run_python("import sys; print('torch' in sys.modules)", folders=(startup_folder(),))
    assert ("False", "") == (done.stdout.strip(), done.stderr)


def test_sitecustomize_of_the_environment_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    done = run_python("import sitecustomize", folders=(startup_folder(), tmp_path))
    assert ("theirs", "") == (done.stdout.strip(), done.stderr)


def test_install_after_a_use_of_torch_is_refused() -> None:
    done = run_python(
        "from torch.distributed.pipelining import Schedule1F1B\n"
        "import penstock.compat\n"
        "penstock.compat.install()"
    )
    assert 1 == done.returncode
    assert "InstallError: torch.distributed.pipelining was already imported" in done.stderr
    assert "(its names are used by: __main__)" in done.stderr


def test_install_twice_is_one_install() -> None:
    done = run_python(
        "import sys, penstock.compat\n"
        "before = len(sys.meta_path)\n"
        "penstock.compat.install()\n"
        "penstock.compat.install()\n"
        "print(len(sys.meta_path) - before)"
    )
    assert "1" == done.stdout.strip()


def test_module_without_a_mirror_is_named() -> None:
    done = run_python(
        "import torch.distributed.pipelining._schedule_visualizer", folders=(startup_folder(),)
    )
    assert "ModuleNotFoundError: torch.distributed.pipelining._schedule_visualizer" in done.stderr
    assert "mirrors of its modules only schedules, stage" in done.stderr


def test_torch_in_place_is_torch_s_own_and_then_ours_again() -> None:
    done = run_python(
        "import torch.distributed.pipelining as ours\n"
        "from penstock.replacing.import_hook import torch_in_place\n"
        "for _ in range(2):\n"
        "    with torch_in_place():\n"
        "        import torch.distributed.pipelining.schedules as theirs\n"
        "    import torch.distributed.pipelining as again\n"
        "    import torch\n"
        "    print(theirs.__name__, again is ours is torch.distributed.pipelining)",
        folders=(startup_folder(),),
    )
    assert ["torch.distributed.pipelining.schedules True"] * 2 == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no command to run"),
        (["--", "no-such-program"], "the program 'no-such-program' was not found"),
    ],
)
def test_run_without_a_program_is_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "penstock", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S)
    assert 1 == done.returncode
    assert message in done.stderr


def test_run_prints_the_folder_and_starts_programs_with_their_arguments() -> None:
    command = [sys.executable, "-m", "penstock", "run"]
    done = subprocess.run([*command, "--path"], capture_output=True, text=True, timeout=PROCESS_S)
    assert str(startup_folder()) == done.stdout.strip()
    code = "import os, sys; print(sys.argv[1:], os.environ.get('PENSTOCK_COMPARE'))"
    given = [*command, "--compare", "--", sys.executable, "-c", code, "--steps", "3"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=PROCESS_S)
    assert "['--steps', '3'] 1" == done.stdout.strip(), done.stderr
