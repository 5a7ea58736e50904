"""A plan in words."""

import penstock
from penstock import LayerCost

LAYERS = [LayerCost(f"l{n}", 3.0, 1.0, 2.0) for n in range(4)]
TABLE = """\
time 50, bound 50 over 2 choices, gap 0.00%
microbatches  size  time  bubble  memory    gap  placement  schedule
           8     1    50   4.00%      16  0.00%  linear     ZB-H1
           4     2    52   7.69%      24  0.00%  linear     ZB-H1
The model is cut before l2.
Nothing is recomputed.
left out: 3 microbatches (linear; loop, 3 per rank; V, 3 per rank): \
a batch of 8 cannot be cut into 3 equal microbatches
left out: 4 microbatches (loop, 3 per rank; V, 3 per rank): 4 layers cannot be cut into 6 stages
left out: 8 microbatches (loop, 3 per rank; V, 3 per rank): 4 layers cannot be cut into 6 stages
"""


def make_plan(**options: object) -> penstock.Plan:
    return penstock.plan(
        LAYERS, 2, batch=8, mb_size=1, microbatches=[3, 4, 8], stages_per_rank=[1, 3], **options
    )


def test_plan_is_a_table_with_what_was_left_out() -> None:
    assert TABLE.splitlines() == str(make_plan()).splitlines()


def test_row_names_a_registered_schedule() -> None:
    row = make_plan().best
    make = penstock.schedules.get(row.schedule_name)
    assert make(num_ranks=2, num_microbatches=row.num_microbatches) == row.schedule


def test_schedule_without_a_name_was_searched() -> None:
    # With one microbatch at a time, no registered schedule fits.
    [row] = make_plan(memory=12, effort=0.02).rows
    assert "searched" == row.schedule_name


def test_row_has_the_bound_of_its_own_search() -> None:
    rows = make_plan(effort=0.02).rows
    assert [row.result.lower_bound for row in rows] == [row.lower_bound for row in rows]


def test_model_on_one_rank_is_not_cut() -> None:
    row = penstock.plan(LAYERS, 1, batch=8, mb_size=1, stages_per_rank=1, effort=0.02).best
    assert ["The model is not cut.", "Nothing is recomputed."] == row.sentences


def test_repr_is_short() -> None:
    plan = make_plan(keep=1)
    assert repr(plan.best) in repr(plan)
    assert repr(plan).endswith(", rows=1, left_out=7)")
