"""Searches for schedules that keep to the memory that 1F1B took, and runs them.

The simulator does not count messages under way, so a schedule that is searched with the whole cap
may exceed it. Then the search is repeated: a rank that was over the cap may hold less than it was
predicted to, by most of what it was over.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
import contenders
from contenders import PENSTOCK_GLOO, Contender, Entrant, Samples
from memory.steps import Setting, count_steps, enter, make_batch, warm_up
from processes import run_ranks

import penstock

LAYOUTS = ("1F1B", "ZB-V")
"""The schedules for whose placements a search is run: one stage on a rank, and a V of two."""
SEARCH_S, TRIES, ROUNDS = 10.0, 4, 8
MOST = 0.9  # Not all: some of what is not predicted goes with the microbatches that are held.


class Try(NamedTuple):
    """A schedule, the memory of each rank that it was searched with, and its simulated time."""

    name: str
    memory: list[float]
    schedule: penstock.Schedule
    simulated_s: float


def enter_schedule(setting: Setting, number: int, schedule: penstock.Schedule) -> Entrant:
    entrant = enter(Contender(PENSTOCK_GLOO, str(number)), setting, schedule)
    assert entrant is not None
    warm_up(entrant, *make_batch(setting))
    return entrant


def count_peaks(setting: Setting, schedule: penstock.Schedule) -> list[int]:
    """What every rank runs to count; returns the peaks of all ranks."""
    entrant = enter_schedule(setting, 0, schedule)
    peaks: list[Any] = [None] * setting.ranks
    dist.all_gather_object(peaks, count_steps(entrant, *make_batch(setting)).peak)
    return peaks


def time_schedules(setting: Setting, schedules: list[penstock.Schedule]) -> Samples:
    """What every rank runs to time all schedules in turn."""
    entrants = [enter_schedule(setting, *pair) for pair in enumerate(schedules)]
    x, target = make_batch(setting)
    return contenders.run_rounds(
        entrants,
        lambda entrant: contenders.time_step(entrant, x, target, lead_in=1),
        title="under the cap",
        warm_up=1,
        rounds=ROUNDS,
    )


def measure_capped(
    setting: Setting, cap: float, costs: dict[str, penstock.CostTable], timeout_s: float
) -> dict[str, Any]:
    """Run 1F1B, and what is found for each placement until it keeps to the cap."""
    tries: list[tuple[Try, list[int]]] = []

    def run_try(tried: Try) -> list[int]:
        peaks: list[int] = run_ranks(
            count_peaks, setting.ranks, setting, tried.schedule, timeout_s=timeout_s
        )
        tries.append((tried, peaks))
        return peaks

    for name in LAYOUTS:
        given = contenders.make_schedule(name, setting.ranks, setting.microbatches)
        assert given is not None
        if name == "1F1B":
            report = penstock.simulate(given, costs[name])
            run_try(Try(name, [], given, report.makespan))
        memory = [cap] * setting.ranks
        for number in range(1, TRIES + 1):
            try:
                found = penstock.search(
                    costs[name],
                    setting.ranks,
                    setting.microbatches,
                    memory=memory,
                    placements=[given.placement],
                    seconds=SEARCH_S,
                )
            except penstock.errors.ScheduleError as exc:
                print(f"{name}, search {number}: {exc}", file=sys.stderr, flush=True)
                break
            peaks = run_try(Try(f"found {number}", memory, found.schedule, found.report.makespan))
            if max(peaks) <= cap:
                break
            memory = [
                of_rank.peak_memory - MOST * (peak - cap) if peak > cap else most
                for most, peak, of_rank in zip(memory, peaks, found.report.ranks, strict=True)
            ]
    schedules = [tried.schedule for tried, _ in tries]
    samples = run_ranks(time_schedules, setting.ranks, setting, schedules, timeout_s=timeout_s)
    rows = [
        {
            "name": tried.name,
            "stages_per_rank": tried.schedule.num_stages // setting.ranks,
            "memory": tried.memory,
            "peaks": peaks,
            "simulated_s": tried.simulated_s,
            "step_s": contenders.quartiles(contenders.step_times(ranks)),
            "schedule": tried.schedule.to_csv(),
        }
        for (tried, peaks), ranks in zip(tries, samples.values(), strict=True)
    ]
    return {**asdict(setting), "cap": cap, "rows": rows}
