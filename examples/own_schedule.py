"""Shows: a schedule of your own, checked and simulated, in a few lines.

1F1B sends each rank into its first backward as early as it can. This one lets every rank run one
forward further ahead, which costs memory and hides the delay of messages.
"""

from penstock import CostTable, schedules, simulate
from penstock.ir import Action, Backward, Forward
from penstock.schedules import Generator, Orders, Shape


def eager_orders(shape: Shape) -> Orders:
    for rank in range(shape.p):
        ahead = min(shape.m, shape.p - rank + 1)
        order: list[Action] = [Forward(rank, mb) for mb in range(ahead)]
        for mb in range(shape.m):
            order.append(Backward(rank, mb))
            if mb + ahead < shape.m:
                order.append(Forward(rank, mb + ahead))
        yield order


eager_1f1b = Generator(name="Eager 1F1B", orders=eager_orders)


def main() -> None:
    costs = CostTable.uniform(3, forward=1.0, backward_input=1.0, backward_weight=1.0, delay=0.3)
    for generator in (schedules.get("1F1B"), eager_1f1b):
        schedule = generator(num_ranks=3, num_microbatches=6)
        schedule.verify()
        print(f"{generator.name}\n{schedule}\n{simulate(schedule, costs)}\n")


if __name__ == "__main__":
    main()
