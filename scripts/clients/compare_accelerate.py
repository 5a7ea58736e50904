"""Run models by accelerate's prepare_pippy, on torch's pipelining and on Penstock's.

    python scripts/clients/compare_accelerate.py --python VENV/bin/python [--only WORDS …]

VENV has accelerate, transformers and torch. Each case runs twice, as it is and on Penstock, and
the outputs are compared with each other and with those of the whole model in one process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from client_runs import start

PROGRAM = Path(__file__).with_name("accelerate_on_cpu.py")
MODELS = ("gpt2", "llama", "bert", "t5", "vit")
# In the venv of the program: the other one need not have torch.
COMPARE = """
import json, sys, torch
names = sys.argv[1::2]
runs = {name: [torch.load(f"{folder}/{rank}.pt") for rank in (0, 1)]
        for name, folder in zip(names, sys.argv[2::2])}

def differences(these, those):
    pairs = list(zip(these, those))
    if len(these) != len(those) or any(a.shape != b.shape for a, b in pairs):
        return "other shapes"
    largest = max(((a - b).abs().max().item() for a, b in pairs), default=0.0)
    return "equal" if all(torch.equal(a, b) for a, b in pairs) else f"differs by {largest:.2g}"

found = []
for rank in (0, 1):
    line = {"rank": rank}
    for name in names:
        run = runs[name][rank]
        line[name] = [run["kind"], [list(value.shape) for value in run["values"]]]
        # Without gather_output, the first rank has none; the last stage may compute some only.
        values, whole = run["values"], run["whole"]
        verdict = differences(values, whole[:len(values)]) if values else "no outputs"
        line[f"{name} beside the whole"] = f"{verdict}, {len(values)} of {len(whole)} outputs"
    if len(names) == 2:
        first, second = (runs[name][rank]["values"] for name in names)
        line["beside each other"] = differences(first, second) if first else "no outputs"
    found.append(line)
print(json.dumps(found))
"""


def compare(python: str, ran: dict[str, Path]) -> list[dict[str, Any]]:
    named = [str(part) for item in ran.items() for part in item]
    command = [python, "-c", COMPARE, *named]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the Python that has accelerate")
    parser.add_argument("--only", nargs="*", help="run the cases with one of these in their names")
    given = parser.parse_args()
    for has_grads, gathers, model in product((False, True), (False, True), MODELS):
        name = f"{model}, gather_output={gathers}, {'with' if has_grads else 'without'} gradients"
        if given.only and not any(words in name for words in given.only):
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            ran: dict[str, Path] = {}
            said = []
            for library in ("torch", "Penstock"):
                out = Path(folder, library)
                out.mkdir()
                arguments = [model, str(int(gathers)), str(int(has_grads)), str(out)]
                _, error = start(
                    given.python, 2, PROGRAM, arguments, on_penstock=library == "Penstock"
                )
                if error:
                    said.append(f"{library} fails: {error}")
                else:
                    ran[library] = out
            said += [str(line) for line in compare(given.python, ran)] if ran else []
        took_s = time.monotonic() - began_s
        sys.stdout.write("\n  ".join([f"{name} ({took_s:.0f} s)", *said]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
