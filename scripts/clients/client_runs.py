"""Runs of a program for torch's pipelining: as it is, and on Penstock."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
FAILS = "fails: "


def start(
    python: str, num_ranks: int, program: Path, arguments: list[str], *, on_penstock: bool
) -> tuple[str, str]:
    """Run a program by torchrun; return what it prints, and its error if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [python, *torchrun, str(num_ranks), str(program), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if on_penstock:
        # The venv of the program need not have Penstock, nor the parts that its command needs.
        folders = [ROOT / "src" / "penstock" / "replacing" / "at_startup", ROOT / "src"]
        known = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *known])
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "", f"no end after {TIMEOUT_S} s"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert not on_penstock or "is Penstock's in this process" in plain, plain
    if not done.returncode:
        return plain, ""
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)$", plain, re.M)
    own = [line for line in errors if "ChildFailedError" not in line]
    # A process that was ended by a signal has said nothing; torchrun says which signal it was.
    own += re.findall(r"Signal \d+ \(\w+\) received by PID \d+", plain)
    return plain, own[0][:200] if own else f"failed without an error: {plain[-1000:]}"


def verdict_on(stock: list[str], own: list[str]) -> str:
    """Compare the lines of two runs in words; a run that failed has one, which begins so."""
    runs = {"torch": stock, "Penstock": own}
    empty = [f"{who} prints nothing" for who, lines in runs.items() if not lines]
    failed = [f"{who} {x[0]}" for who, x in runs.items() if x and x[0].startswith(FAILS)]
    if empty or failed:
        return "; ".join(empty + failed)
    if stock == own:
        return f"equal, {len(own)} lines"
    if len(stock) != len(own):
        return f"torch prints {len(stock)} lines, Penstock {len(own)}"
    others = [f"{a} on torch, {b}" for a, b in zip(stock, own, strict=True) if a != b]
    return f"{len(others)} of {len(own)} lines differ: {others[:1]}"
