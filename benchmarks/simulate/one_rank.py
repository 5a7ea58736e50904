"""Construct, verify and program one rank's part of a large schedule, in a process of its own."""

import json
import resource
import sys
import time
import tracemalloc
from itertools import pairwise

import penstock
from penstock.ir import LazyOrders
from penstock.runtime.program import make_program

SIZE = (256, 2048)


def prepare(name: str, rank: int) -> tuple[penstock.Schedule, list[float]]:
    """Do what a rank does before its first step; return the schedule and the seconds of each."""
    p, m = SIZE
    watch = [time.process_time()]
    schedule = penstock.schedules.get(name)(num_ranks=p, num_microbatches=m)
    watch.append(time.process_time())
    schedule.verify(rank=rank)
    watch.append(time.process_time())
    make_program(schedule, rank)  # Verifies once more, as it does for a pipeline.
    watch.append(time.process_time())
    return schedule, [after - before for before, after in pairwise(watch)]


def main() -> None:
    name, rank = sys.argv[1], int(sys.argv[2])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    schedule, (construct_s, verify_s, program_s) = prepare(name, rank)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(schedule.orders, LazyOrders)
    actions = len(schedule.orders[rank])
    tracemalloc.start()
    prepare(name, rank)
    _, traced = tracemalloc.get_traced_memory()
    found = {
        "name": name,
        "rank": rank,
        "actions": actions,
        "construct_s": construct_s,
        "verify_s": verify_s,
        "program_s": program_s,
        "process_mib": (after_kib - before_kib) / 2**10,
        "traced_mib": traced / 2**20,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
