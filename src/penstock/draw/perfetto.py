"""Timelines as a trace, for Perfetto and chrome://tracing.

In the trace event format a panel is a process, and a rank is one of its threads; its gathers and
reductions are on another. Processes and
threads are numbered together: a viewer would put a thread first if it had the number of its
process, and the ranks would be out of order.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from penstock.costs.units import MemoryUnit, TimeUnit
from penstock.draw.panel import Kind, Panel, bars, collective_bars, has_collectives
from penstock.ir.action import is_compute
from penstock.ir.dataflow import Dataflow
from penstock.ir.message import Message
from penstock.timeline import Report

_MICROSECONDS: dict[TimeUnit, float] = {"": 1e3, "s": 1e6}
_UNITLESS = "Times have no unit: 1 is shown as 1 ms."
# chrome://tracing knows these names; Perfetto has its own colours, one for each kind.
_COLOURS = {
    Kind.FORWARD: "rail_response",
    Kind.BACKWARD: "rail_idle",
    Kind.BACKWARD_INPUT: "yellow",
    Kind.BACKWARD_WEIGHT: "rail_load",
    Kind.RECOMPUTE: "grey",
    Kind.GATHER: "rail_animation",
    Kind.REDUCE: "olive",
}

_Event = dict[str, Any]


def trace(panels: Sequence[Panel]) -> str:
    """Return JSON text with one event per line, to be saved as a .json file and opened."""
    numbers = count(1)
    flows = count(1)
    events: list[_Event] = []
    for process in _processes(panels, numbers):
        events += _names(process)
        events += _bars(process)
        events += _collectives(process)
        events += _memory(process)
        events += _messages(process, flows)
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    other = {"unit of time": _UNITLESS} if any(p.time_unit == "" for p in panels) else {}
    return (
        f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n'
        f'"traceEvents": [\n{lines}\n]}}\n'
    )


@dataclass(frozen=True, slots=True)
class _Process:
    """One timeline of the trace, and the numbers of its process and threads."""

    title: str
    report: Report
    time_unit: TimeUnit
    memory_unit: MemoryUnit
    pid: int
    tids: tuple[int, ...]
    collective_tids: tuple[int, ...]
    """The threads of gathers and reductions; empty if there are none."""

    def microseconds(self, time: float) -> float:
        return time * _MICROSECONDS[self.time_unit]

    def event(self, phase: str, rank: int, time: float, **rest: Any) -> _Event:
        place = {"pid": self.pid, "tid": self.tids[rank]}
        return {"ph": phase, **place, "ts": self.microseconds(time), **rest}


def _processes(panels: Sequence[Panel], numbers: Iterator[int]) -> Iterator[_Process]:
    for panel in panels:
        both = [(panel.title, panel.report)]
        if panel.beneath:
            both.append((f"{panel.title}: simulated", panel.beneath))
        for title, report in both:
            num_ranks = len(report.ranks)
            pid, *tids = (next(numbers) for _ in range(num_ranks + 1))
            others = [next(numbers) for _ in range(num_ranks if has_collectives(report) else 0)]
            yield _Process(
                title,
                report,
                panel.time_unit,
                panel.memory_unit,
                pid,
                tuple(tids),
                tuple(others),
            )


def _names(process: _Process) -> Iterator[_Event]:
    """Yield the names that the viewer shows beside the lanes, and their order."""

    def about(what: str, tid: int, **args: Any) -> _Event:
        return {"ph": "M", "pid": process.pid, "tid": tid, "name": what, "args": args}

    yield about("process_name", process.pid, name=process.title)
    yield about("process_sort_index", process.pid, sort_index=process.pid)
    if process.time_unit == "":
        yield about("process_labels", process.pid, labels=_UNITLESS)
    threads_per_rank = 2 if process.collective_tids else 1
    for rank, tid in enumerate(process.tids):
        yield about("thread_name", tid, name=f"rank {rank}")
        yield about("thread_sort_index", tid, sort_index=rank * threads_per_rank)
    for rank, tid in enumerate(process.collective_tids):
        yield about("thread_name", tid, name=f"rank {rank}: sharding")
        yield about("thread_sort_index", tid, sort_index=rank * threads_per_rank + 1)


def _bars(process: _Process) -> Iterator[_Event]:
    """Yield the bars; the viewer puts the halves of an overlap one below the other."""
    for rank in range(len(process.tids)):
        for bar in bars(process.report, rank):
            action, kind, start, end, _ = bar
            yield process.event(
                "X",
                rank,
                start,
                dur=process.microseconds(end) - process.microseconds(start),
                name=f"{kind.value}{bar.number}",
                cat=kind.words,
                cname=_COLOURS[kind],
                args={
                    "stage": action.stage,
                    "microbatch": bar.number,
                    "kind": kind.words,
                    "start": start,
                    "end": end,
                },
            )


def _collectives(process: _Process) -> Iterator[_Event]:
    """Yield the gathers and reductions, named by their stage."""
    for rank, tid in enumerate(process.collective_tids):
        for action, kind, start, end, _ in collective_bars(process.report, rank):
            args = {"stage": action.stage, "kind": kind.words, "start": start, "end": end}
            yield {
                **process.event("X", rank, start),
                "tid": tid,
                "dur": process.microseconds(end) - process.microseconds(start),
                "name": f"{kind.words} {action.stage}",
                "cat": kind.words,
                "cname": _COLOURS[kind],
                "args": args,
            }


def _memory(process: _Process) -> Iterator[_Event]:
    """Yield a counter of each rank's planned memory, and one of the measured, if there is any."""
    unit = f" ({process.memory_unit})" if process.memory_unit else ""
    for rank in range(len(process.tids)):
        counters = {f"memory of rank {rank}{unit}": process.report.memory(rank)}
        if process.report.measured:
            measured = process.report.measured_memory(rank)
            counters[f"measured memory of rank {rank} (bytes)"] = measured
        for name, points in counters.items():
            for time, held in points:
                yield process.event("C", rank, time, name=name, args={"held": held})


def _messages(process: _Process, flows: Iterator[int]) -> Iterator[_Event]:
    """Yield an arrow from the bar that makes each message to the bar that needs it."""
    dataflow = Dataflow(process.report.timeline.schedule)
    # Arrows use the middle of a bar: at its end, the next bar may already begin.
    made: dict[Message, tuple[int, float]] = {}
    needed: dict[Message, tuple[int, float]] = {}
    for rank, action, start, end in process.report.actions():
        if is_compute(action):
            at = rank, (start + end) / 2
            made.update((key, at) for key in dataflow.made(action))
            needed.update((key, at) for key in dataflow.needed(action))
    for message, at in made.items():
        if dataflow.is_sent(message):
            flow, kind = next(flows), message.kind
            yield process.event("s", *at, name=kind, cat="message", id=flow)
            yield process.event("f", *needed[message], name=kind, cat="message", id=flow, bp="e")
