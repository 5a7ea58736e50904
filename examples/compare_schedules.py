"""Shows: every training schedule that Penstock knows, by bubble and memory, for your costs.

Four ranks, eight microbatches. A rank's share of the model takes 2 for F, 2 for I and 1 for W; a
message takes 0.1; a microbatch holds 1 of memory on a rank, and 0.8 from the end of I on.
"""

import penstock

RANKS, MICROBATCHES = 4, 8


def main() -> None:
    print(f"{'':23}{'makespan':>8}  bubble  {'span':>5}  bubble  memory")
    for name in penstock.schedules.names():
        if name == "ForwardOnly":
            continue  # For inference: it does not do the same work.
        schedule = penstock.schedules.get(name)(num_ranks=RANKS, num_microbatches=MICROBATCHES)
        costs = penstock.CostTable.uniform(
            schedule.num_stages,
            stages_per_rank=schedule.num_stages // RANKS,
            forward=2.0,
            backward_input=2.0,
            backward_weight=1.0,
            after_forward=1.0,
            after_input=0.8,
            delay=0.1,
        )
        report = penstock.simulate(schedule, costs)
        print(
            f"{name:23}{report.makespan:8.2f}  {report.bubble_by_makespan:6.1%}  "
            f"{report.span:5.2f}  {report.bubble_by_span:6.1%}  {report.peak_memory:6.2f}"
        )


if __name__ == "__main__":
    main()
