"""Train by NeMo Automodel's AutoPipeline, on torch's pipelining and on Penstock's.

    python scripts/clients/compare_automodel.py --python VENV/bin/python [--only SCHEDULE …]

VENV has nemo_automodel, transformers and torch. Each schedule runs twice, as it is and on
Penstock, and the losses and gradient norms of all ranks are compared.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from client_runs import FAILS, start, verdict_on

PROGRAM = Path(__file__).with_name("automodel_on_cpu.py")
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
)


def run(python: str, schedule: str, grows: bool, *, on_penstock: bool) -> list[str]:
    """Return the losses and norms that the program prints, or its error if it fails."""
    text, error = start(python, 2, PROGRAM, [schedule, str(int(grows))], on_penstock=on_penstock)
    if error:
        return [FAILS + error]
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python that has nemo_automodel")
    parser.add_argument("--only", nargs="*", default=SCHEDULES, help="the schedules to run")
    given = parser.parse_args()
    for schedule, grows in product(given.only, (False, True)):
        stock = run(given.python, schedule, grows, on_penstock=False)
        own = run(given.python, schedule, grows, on_penstock=True)
        lengths = "growing" if grows else "fixed"
        sys.stdout.write(f"{schedule}, {lengths} lengths: {verdict_on(stock, own)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
