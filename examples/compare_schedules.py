"""Shows: every training schedule that Penstock knows, by bubble and memory, for one model.

The model has 16 layers that cost different amounts. Each schedule cuts it into as many stages as it
needs, on 4 ranks, for 8 microbatches; a cut with equal numbers of layers, not a balanced one.
"""

from penstock import CostTable, Schedule, schedules, simulate

RANKS, MICROBATCHES = 4, 8

# Of each layer: F and I take this time, W half of it. A microbatch holds 1/4 of memory on a layer,
# so that a rank with 4 layers holds 1.
LAYERS = [1.2, *[1.0] * 14, 1.4]


def costs_of(schedule: Schedule) -> CostTable:
    """The layers' costs, added up for each of the schedule's stages."""
    size = len(LAYERS) // schedule.num_stages
    times = [sum(LAYERS[first : first + size]) for first in range(0, len(LAYERS), size)]
    return CostTable(
        forward=times,
        backward_input=times,
        backward_weight=[time / 2 for time in times],
        after_forward=[size / 4] * schedule.num_stages,  # One value for each stage,
        after_input=[size / 5] * schedule.num_stages,
        delay=0.1,  # or one number for all.
    )


def main() -> None:
    print(f"Simulated: {len(LAYERS)} layers on {RANKS} ranks, {MICROBATCHES} microbatches.")
    print(f"{'':22}  makespan  bubble    span  bubble  memory")
    for name in schedules.names():
        if name == "ForwardOnly":
            continue  # For inference: it does not do the same work.
        schedule = schedules.get(name)(num_ranks=RANKS, num_microbatches=MICROBATCHES)
        report = simulate(schedule, costs_of(schedule))
        print(
            f"{name:22}  {report.makespan:8.2f}  {report.bubble_by_makespan:6.1%}  "
            f"{report.span:6.2f}  {report.bubble_by_span:6.1%}  {report.peak_memory:6.2f}"
        )


if __name__ == "__main__":
    main()
