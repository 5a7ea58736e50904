"""Panels that the tests of all drawings draw."""

from penstock import schedules
from penstock.costs import CostTable
from penstock.draw.panel import Panel
from penstock.ir import Schedule
from penstock.passes import Gathers, add_gathers, add_recompute
from penstock.passes.held_memory import Held, held_along
from penstock.sim import simulate
from penstock.timeline import RecordedStep, Recording, Report


def panel(
    name: str = "1F1B",
    ranks: int = 4,
    microbatches: int = 8,
    *,
    title: str = "",
    costs: CostTable | None = None,
) -> Panel:
    """A simulated schedule, without units; its title is its name unless one is given."""
    return Panel(title or name, simulate(schedule(name, ranks, microbatches), costs))


def schedule(name: str = "1F1B", ranks: int = 4, microbatches: int = 8) -> Schedule:
    return schedules.get(name)(num_ranks=ranks, num_microbatches=microbatches)


def overlap_panel(ranks: int = 4, microbatches: int = 10) -> Panel:
    """DualPipeV: some of its forwards and backwards share their time."""
    costs = CostTable.uniform(2 * ranks, stages_per_rank=2, overlap_saving=0.5)
    return panel("DualPipeV", ranks, microbatches, costs=costs)


def gathered_panel(policy: Gathers | None = None, *, gather: float = 1.0) -> Panel:
    """ZB-V with sharded stages: the gathers and reductions of a rank's stages take `gather`."""
    made = add_gathers(schedule("ZB-V", 2, 4), policy or Gathers.per_need())
    costs = CostTable.uniform(4, stages_per_rank=2, gather=gather, reduce=gather, gathered=1.0)
    return Panel("ZB-V, gathered", simulate(made, costs))


def recomputed_panel() -> Panel:
    """ZB-V, half of whose forwards run twice."""
    made = add_recompute(schedule("ZB-V"), lambda stage, mb: mb % 2 == 0)
    return Panel("ZB-V, recomputed", simulate(made))


def unit_panel(name: str = "ZB-H1", ranks: int = 4, microbatches: int = 8) -> Panel:
    """Like a measured step: in seconds and bytes."""
    return Panel(f"{name}, measured", _measured(name, ranks, microbatches), "s", "bytes")


def beneath_panel(name: str = "1F1B", ranks: int = 4, microbatches: int = 8) -> Panel:
    """A step in seconds and bytes, with the simulated one, which is quicker, beneath."""
    made = schedule(name, ranks, microbatches)
    costs = CostTable.uniform(
        made.num_stages,
        forward=0.010,
        backward_input=0.010,
        backward_weight=0.010,
        after_forward=32 * 1024**2,
        after_input=8 * 1024**2,
    )
    measured = _measured(name, ranks, microbatches)
    return Panel(f"{name}, measured", measured, "s", "bytes", simulate(made, costs))


def memory_panel(name: str = "1F1B", ranks: int = 4, microbatches: int = 8) -> Panel:
    """A recording in whose step each rank held a MiB more than its costs say."""
    report = _measured(name, ranks, microbatches)
    made = report.timeline.schedule
    held = tuple(
        tuple(
            Held(level.during + 1024**2, level.after + 1024**2)
            for level in held_along(made, rank, report.costs)
        )
        for rank in range(ranks)
    )
    recording = Recording((RecordedStep(0, report.timeline),), held)
    return Panel.of_recording(f"{name}, measured", recording, report.costs)


def _measured(name: str, ranks: int, microbatches: int) -> Report:
    """Stages of unequal times, as a real run has them."""
    made = schedule(name, ranks, microbatches)
    stages = range(made.num_stages)
    costs = CostTable(
        forward=[0.011 + 0.0007 * (stage % 3) for stage in stages],
        backward_input=[0.012 + 0.0011 * (stage % 2) for stage in stages],
        backward_weight=[0.010 + 0.0009 * (stage % 3) for stage in stages],
        after_forward=32 * 1024**2,
        after_input=8 * 1024**2,
        delay=0.0004,
    )
    return simulate(made, costs)
