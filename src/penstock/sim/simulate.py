"""The way in."""

from penstock.costs.cost_table import CostTable
from penstock.ir import Schedule
from penstock.passes import add_comms
from penstock.passes.memory import check_stages, whole_shares
from penstock.passes.verify import check_orders
from penstock.sim.engine import run
from penstock.sim.report import Report, make_report


def simulate(
    schedule: Schedule,
    costs: CostTable | None = None,
    *,
    blocking: bool = False,
) -> Report:
    """Computes when every action of `schedule` starts and ends, and what follows from it.

    Verifies the schedule too. Without `costs`, each rank's share of F, I and W takes 1 each,
    messages take no time, and a microbatch holds 1 of memory on a rank.
    Communication overlaps compute. If `blocking`, it does not: a send keeps its rank until the
    message has arrived, and a receive waits for it.

    >>> from penstock import schedules
    >>> schedule = schedules.get("ZB-H2")(num_ranks=4, num_microbatches=8)
    >>> simulate(schedule)
    Report(makespan=27, span=24, bubble_by_makespan=0.1111, bubble_by_span=0.0000, peak_memory=7)
    """
    check_orders(schedule)  # The rest of `verify` is a walk, and so is the simulation.
    if costs is None:
        costs = _unit_costs(schedule)
    check_stages(schedule, costs)
    if blocking and not schedule.has_comms:
        schedule = add_comms(schedule)
    return make_report(run(schedule, costs, blocking=blocking), costs)


def _unit_costs(schedule: Schedule) -> CostTable:
    share, _ = whole_shares(schedule)
    return CostTable(
        forward=share,
        backward_input=share,
        backward_weight=share,
        after_forward=share,
        after_input=share,
    )
