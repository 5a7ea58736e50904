"""Write the page's schedule and costs as Python, ready to run."""

from collections.abc import Sequence

from penstock.costs import CostTable
from penstock.ir import Schedule
from penstock.solver.comparison import SEARCHED
from penstock.studio.typed_inputs import Inputs


def python_text(inputs: Inputs, name: str, schedule: Schedule) -> str:
    """Return Python that makes the schedule on the page and simulates it.

    The schedule is the same, unless a search ran out of time.
    """
    placement = schedule.placement
    costs = _call("penstock.CostTable", _cost_arguments(inputs.question.costs.table(placement)))
    made = (
        _search(inputs)
        if name == SEARCHED
        else _generate(inputs, name, placement.num_stages // placement.num_ranks)
    )
    return (
        "import penstock\n"
        "\n"
        f"costs = {costs}\n"
        f"schedule = {made}\n"
        "print(penstock.simulate(schedule, costs))\n"
        "\n"
        "# To train with it: penstock.Pipeline(stages, schedule, loss_fn=loss_fn)\n"
    )


def _generate(inputs: Inputs, name: str, stages_per_rank: int) -> str:
    arguments = {
        "num_ranks": repr(inputs.question.num_ranks),
        "num_microbatches": repr(inputs.question.num_microbatches),
    }
    if stages_per_rank == inputs.stages_per_rank:
        arguments["stages_per_rank"] = repr(stages_per_rank)
    return _call(f'penstock.schedules.get("{name}")', arguments)


def _search(inputs: Inputs) -> str:
    question = inputs.question
    arguments = {
        "num_ranks": repr(question.num_ranks),
        "num_microbatches": repr(question.num_microbatches),
    }
    if question.memory is not None:
        arguments["memory"] = repr(question.memory)
    if question.clock != "makespan":
        arguments["clock"] = repr(question.clock)
    if question.recompute:
        arguments["recompute"] = "True"
    arguments["effort"] = repr(inputs.effort)
    return _call("penstock.search", {"": "costs", **arguments}) + ".schedule"


def _cost_arguments(costs: CostTable) -> dict[str, str]:
    arguments = {
        "forward": _list(costs.forward),
        "backward_input": _list(costs.backward_input),
        "backward_weight": _list(costs.backward_weight),
        "after_forward": _list(costs.after_forward),
        "after_input": _list(costs.after_input),
    }
    halves = zip(costs.backward_input, costs.backward_weight, strict=True)
    if costs.backward != tuple(map(sum, halves)):
        arguments["backward"] = _list(costs.backward)
    if costs.recompute != costs.forward:
        arguments["recompute"] = _list(costs.recompute)
    if any(costs.after_dropping):
        arguments["after_dropping"] = _list(costs.after_dropping)
    if any(costs.delay):
        arguments["delay"] = repr(costs.delay[0])
    if costs.overlap_saving:
        arguments["overlap_saving"] = repr(costs.overlap_saving)
    if costs.num_microbatches is not None:
        rows = costs.time_scale
        arguments["time_scale"] = repr(list(rows[0] if len({*rows}) == 1 else rows))
        arguments["memory_scale"] = repr(list(costs.memory_scale))
    return arguments


def _list(values: Sequence[float]) -> str:
    """Return the values as a list, shortened if they are all the same."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"[{values[0]!r}] * {len(values)}"
    return repr(list(values))


def _call(function: str, arguments: dict[str, str]) -> str:
    """Return a call on one line if it fits, or else with one line per argument."""
    parts = [f"{name}={value}" if name else value for name, value in arguments.items()]
    line = f"{function}({', '.join(parts)})"
    if len(line) <= 80:
        return line
    return f"{function}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
