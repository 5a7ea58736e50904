"""Processes over gloo in which pipelines fail, one after another, and what each rank saw.

Every wait has a limit, and no process outlives its test.
"""

import datetime
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from limits import HANG_S
from penstock import Pipeline, PipelineStage, schedules
from worker_pool import fork_with_torch

CPU = torch.device("cpu")
Scenario = Callable[[int, int], None]
"""Takes the rank and the number of ranks."""


class Boom(Exception):
    """What a user's code raises."""


def note_failure() -> None:
    """Tell when this rank failed by itself; all clocks of one machine are one."""
    Path(os.environ["PENSTOCK_TEST_FOLDER"], "failed_at").write_text(str(time.time()))


def boom(what: str) -> None:
    note_failure()
    raise Boom(what)


class Explosive(nn.Module):
    """A linear layer that calls `burn(call)` in each forward, from 1 on."""

    def __init__(self, burn: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.burn = burn
        self.call = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.call += 1
        if self.burn is not None:
            self.burn(self.call)
        y: torch.Tensor = self.linear(x)
        return y


def make_pipeline(
    rank: int,
    num_ranks: int,
    name: str = "1F1B",
    *,
    m: int | None = None,
    module_of: Callable[[int], nn.Module] = lambda stage: Explosive(),
    group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Pipeline:
    """The pipeline of a rank; `m` microbatches, or as many as any schedule needs."""
    schedule = schedules.get(name)(num_ranks=num_ranks, num_microbatches=m or 2 * num_ranks)
    stages = [
        PipelineStage(module_of(index), index, schedule.num_stages, CPU, group=group)
        for index in schedule.placement.stages_of(rank)
    ]
    return Pipeline(
        stages, schedule, **({"loss_fn": nn.functional.mse_loss, "timeout": HANG_S} | kwargs)
    )


def step(pipeline: Pipeline, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        rows = pipeline.num_microbatches
        pipeline.step(torch.ones(rows, 4), target=torch.ones(rows, 4))


class Report(dict[str, Any]):
    """What one rank raised: kinds, text, notes, seconds; or that it ended well."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def is_a(self, *names: str) -> bool:
        return set(names) <= set(self["kinds"])


def _report(error: BaseException | None, began_s: float) -> Report:
    return Report(
        kinds=[] if error is None else [kind.__name__ for kind in type(error).__mro__],
        text=str(error),
        notes=list(getattr(error, "__notes__", [])),
        seconds=time.monotonic() - began_s,
        ended_at=time.time(),
        trace="" if error is None else "".join(traceback.format_exception(error)),
    )


def _attempt(scenario: Scenario, rank: int, num_ranks: int) -> Report:
    began_s = time.monotonic()
    try:
        scenario(rank, num_ranks)
    except BaseException as error:
        report = _report(error, began_s)
        error.__traceback__ = None
        return report
    return _report(None, began_s)


def _main(
    rank: int,
    num_ranks: int,
    folder: str,
    scenarios: Sequence[tuple[str, Scenario]],
    env: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    # What a shell starts in the background ignores interrupts, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=HANG_S),
    )
    path = Path(folder)
    for name, scenario in scenarios:
        report = _attempt(scenario, rank, num_ranks)
        (path / f"unfinished {rank}").write_text(json.dumps(report))
        (path / f"unfinished {rank}").rename(path / f"{name} rank{rank}")
        gc.collect()
        if name == scenarios[-1][0]:  # Some may have been killed.
            break
        # The group that everybody shares still works.
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert sum(range(num_ranks)) == total.item()
        if rank == 0 and (path / "failed_at").exists():
            (path / "failed_at").rename(path / f"{name} failed_at")
        dist.barrier()
    dist.destroy_process_group()


class Session:
    """The processes of some scenarios; use it as a context, which ends them all."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        scenarios: Sequence[tuple[str, Scenario]],
        *,
        shared_memory: str = "1",
        watch: str = "1",
    ) -> None:
        self.folder = folder
        self.num_ranks = num_ranks
        context = fork_with_torch()
        env = {
            "GLOO_SOCKET_IFNAME": "lo",
            "PENSTOCK_SHARED_MEMORY": shared_memory,
            "PENSTOCK_WATCH": watch,
            "PENSTOCK_TEST_FOLDER": str(folder),
        }
        args = (num_ranks, str(folder), list(scenarios), env)
        self.processes = [
            context.Process(target=_main, args=(rank, *args), daemon=True)
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> "Session":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(HANG_S)
        assert not any(process.is_alive() for process in self.processes)

    def comes(self, name: str, limit_s: float) -> bool:
        """Whether a file comes in time, while the processes live."""
        until_s = time.monotonic() + limit_s
        while not (self.folder / name).exists():
            if time.monotonic() > until_s or not all(p.is_alive() for p in self.processes):
                return False
            time.sleep(0.02)
        return True

    def signal(self, name: str, rank: int, signum: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        (self.folder / f"{name} failed_at").write_text(str(time.time()))
        os.kill(pid, signum)

    def join(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(until_s - time.monotonic(), 0.01))

    def reports(self, name: str) -> list[Report]:
        """What the ranks saw of a scenario, in order; raises if one did not get through it."""
        found = []
        for rank in range(self.num_ranks):
            path = self.folder / f"{name} rank{rank}"
            assert path.exists(), f"rank {rank} did not get to the end of {name!r}"
            found.append(self.report(name, rank))
        return found

    def report(self, name: str, rank: int) -> Report:
        return Report(json.loads((self.folder / f"{name} rank{rank}").read_text()))

    def failed_at(self, name: str) -> float:
        return float((self.folder / f"{name} failed_at").read_text())
