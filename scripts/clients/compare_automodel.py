"""Train by NeMo Automodel's AutoPipeline, on torch's pipelining and on Penstock's.

    python scripts/clients/compare_automodel.py --python VENV/bin/python [--only WORDS …]

VENV has nemo_automodel, transformers and torch. Each case runs twice, as it is and on Penstock, and
the losses and gradient norms of all ranks are compared.
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


FEATURES = {"pipeline alone": "none", "FSDP2": "fsdp", "TP": "tp"}


def run(python: str, arguments: list[str], *, on_penstock: bool) -> list[str]:
    """Return the losses and norms that the program prints, or its error if it fails."""
    num_ranks = 2 if arguments[-1] == "none" else 4
    text, error = start(python, num_ranks, PROGRAM, arguments, on_penstock=on_penstock)
    if error:
        return [FAILS + error]
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python that has nemo_automodel")
    parser.add_argument("--only", nargs="*", help="run the cases with one of these in their names")
    given = parser.parse_args()
    for (feature, option), schedule, grows in product(FEATURES.items(), SCHEDULES, (False, True)):
        name = f"{feature}, {schedule}, {'growing' if grows else 'fixed'} lengths"
        if given.only and not any(words in name for words in given.only):
            continue
        arguments = [schedule, str(int(grows)), option]
        stock = run(given.python, arguments, on_penstock=False)
        own = run(given.python, arguments, on_penstock=True)
        sys.stdout.write(f"{name}: {verdict_on(stock, own)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
