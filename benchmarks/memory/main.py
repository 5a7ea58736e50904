"""How much memory does a step take on each rank: ours, torch's, and as simulated?

A transformer of 8 blocks on 2 and on 4 ranks, with and without checkpointing of each block, over
gloo. Then schedules are searched for that keep to the memory that 1F1B took, and are run.
"""

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK_GLOO, TORCH, Contender, Entrant
from memory.capped import LAYOUTS, measure_capped
from memory.steps import Setting, count_steps, enter, make_batch, warm_up
from memory.tables import print_tables
from processes import environment, run_ranks

import penstock

BOTH = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZB-V", "DualPipeV")
SCHEDULES = (*BOTH, "ZB-H1", "V-Half", "V-Min")


@dataclass(frozen=True)
class OfRank:
    """What was measured on one rank, in bytes."""

    peak: int
    held: int
    working: int
    left: int
    kept: int
    """What is live from step to step beside weights, gradients and batch, and is in no other."""
    resident: int
    """The growth of resident memory, weights and their gradients included, in uncounted steps."""
    predicted: float
    """The simulator's peak from measured costs; 0 for torch's schedules."""


class Measured(NamedTuple):
    """All ranks of a contender, and the costs that were measured there if it is ours."""

    ranks: list[OfRank]
    costs: str


def run_setting(setting: Setting, entered: Sequence[Contender]) -> dict[Contender, Measured]:
    """What every rank runs: one contender after the other, of which only one is there at a time."""
    found = {}
    for contender in entered:
        measured = run_contender(contender, setting)
        if measured is not None:
            found[contender] = measured
        if dist.get_rank() == 0:
            print(f"{setting}: {' '.join(contender)}", file=sys.stderr, flush=True)
    return found


def run_contender(contender: Contender, setting: Setting) -> Measured | None:
    """Measure a contender; None if it takes no such shape."""
    x, target = make_batch(setting)
    before, live_before = forget_memory(), tensor_bytes()
    entrant = enter(contender, setting)
    if entrant is None:
        return None
    warm_up(entrant, x, target)
    resident = resident_bytes("VmHWM") - before
    kept = tensor_bytes() - live_before - weight_bytes(entrant)
    predicted, costs = 0.0, ""
    if contender.library != TORCH:
        predicted, costs = predict(entrant, setting, x, target)
    everyone: list[Any] = [None] * setting.ranks
    live = count_steps(entrant, x, target)
    mine = OfRank(**asdict(live), kept=kept - live.left, resident=resident, predicted=predicted)
    dist.all_gather_object(everyone, mine)
    return Measured(everyone, costs)


def forget_memory() -> int:
    """Return freed pages to the system and forget the peak; returns what is resident then."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(name: str) -> int:
    """VmRSS is what is resident now, and VmHWM the peak since it was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows of; of tensors that share memory, once."""
    gc.collect()
    found = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    return sum(storages.values())


def weight_bytes(entrant: Entrant) -> int:
    """Bytes of the parameters and of their gradients, which are as large."""
    return sum(2 * param.nbytes for module in entrant.modules for param in module.parameters())


def predict(entrant: Entrant, setting: Setting, x: Tensor, target: Tensor) -> tuple[float, str]:
    """Measure the costs of the stages; return the simulated peak of this rank, and the costs."""
    schedule = entrant.pipeline.schedule
    held = schedule.placement.stages_of(dist.get_rank())
    stages = [
        penstock.PipelineStage(module, stage, schedule.num_stages, "cpu")
        for module, stage in zip(entrant.modules, held, strict=True)
    ]
    with contenders.chosen_link(entrant.contender):
        costs = penstock.measure_costs(
            stages,
            setting.microbatches,
            nn.functional.mse_loss,
            *([x] if entrant.has_first else []),
            target=target if entrant.has_last else None,
            repeats=3 if entrant.contender.schedule in LAYOUTS else 1,
        )
    report = penstock.simulate(schedule, costs)
    return report.ranks[dist.get_rank()].peak_memory, costs.to_json()


def as_record(setting: Setting, measured: dict[Contender, Measured]) -> dict[str, Any]:
    by_name: dict[str, dict[str, Any]] = {}
    for who, found in measured.items():
        library = "torch" if who.library == TORCH else "ours"
        by_name.setdefault(who.schedule, {})[library] = list(map(asdict, found.ranks))
    return {**asdict(setting), "schedules": by_name}


def save(record: dict[str, Any], path: Path | None) -> None:
    """Write what is known so far, if a file was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--width", type=int, default=256, help="of the blocks (default 256)")
    parser.add_argument("--microbatches", type=int, default=8, help="in a step (default 8)")
    parser.add_argument("--only", metavar="NAME", action="append", help="this schedule; repeatable")
    parser.add_argument("--checkpointed", action="store_true", help="only with checkpointing")
    parser.add_argument("--quick", action="store_true", help="2 ranks, and no search")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each setting")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--tables", type=Path, help="print the tables of such a file, and end")
    args = parser.parse_args()
    args.names = [penstock.schedules.get(name).name for name in args.only or SCHEDULES]
    args.numbers = [2] if args.quick else [int(number) for number in args.ranks.split(",")]
    args.searches = not args.quick and set(LAYOUTS) <= set(args.names)
    return args


def main() -> None:
    args = parse_args()
    if args.tables:
        print_tables(json.loads(args.tables.read_text()))
        return
    record: dict[str, Any] = {**environment(), "settings": [], "capped": []}
    entered = contenders.list_contenders(args.names, (TORCH, PENSTOCK_GLOO))
    for ranks in args.numbers:
        for is_checkpointed in (True,) if args.checkpointed else (False, True):
            setting = Setting(ranks, args.width, args.microbatches, is_checkpointed)
            measured = run_ranks(run_setting, ranks, setting, entered, timeout_s=args.timeout)
            record["settings"].append(as_record(setting, measured))
            save(record, args.save)
            if is_checkpointed and args.searches:
                own = {who.schedule: x for who, x in measured.items() if who.library != TORCH}
                cap = max(rank.peak for rank in own["1F1B"].ranks)
                costs = {name: penstock.CostTable.from_json(own[name].costs) for name in LAYOUTS}
                record["capped"].append(measure_capped(setting, cap, costs, args.timeout))
                save(record, args.save)
    print_tables(record)


if __name__ == "__main__":
    main()
