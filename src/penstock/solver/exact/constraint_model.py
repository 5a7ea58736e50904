"""The CP-SAT model of a problem: variables, constraints, hints, and the schedule of a solution.

On each stage the forwards of microbatches that are alike run in the order of their numbers, and so
do input backwards (a full backward counts as one) and weight backwards. This excludes no best time.
Take any schedule and renumber such microbatches on each stage. The k-th forward and the k-th
backward among them are now those of the k-th of them, and the k-th weight backward is that of the
k-th backward that has one. Times and memory stay the same, and nothing comes before what it waits
for. When k of their actions of one kind have started, k of the kind they wait for had ended, and
the first k of these are now those of the first k of them. Microbatches that differ may run in any
order on any stage.

If forwards may be recomputed, microbatches are not alike, because some are dropped after their
forward: they may run in any order too. But the names of those with the same costs do not matter, so
their forwards on the first stage run in the order of their numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ortools.sat.python import cp_model

from penstock.ir import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MicrobatchId,
    Rank,
    Recompute,
    Schedule,
    StageId,
)
from penstock.ir.action import URGENT_BACKWARD_TYPES, compute_parts
from penstock.sim import simulate
from penstock.solver.exact.ticks import RankMemory, TickProblem
from penstock.timeline.bubble_report import TimedAction


class _Cell(NamedTuple):
    """The variables of one microbatch on one stage."""

    forward_start: cp_model.IntVar
    backward_start: cp_model.IntVar
    backward_end: cp_model.IntVar
    weight_start: cp_model.IntVar
    is_fused: cp_model.IntVar
    is_dropped: cp_model.IntVar
    values_start: cp_model.IntVar
    """The start of R if the microbatch is dropped, and that of F otherwise."""


class Model:
    """The variables and constraints for `problem`; the solver minimises `time`."""

    def __init__(self, problem: TickProblem) -> None:
        self.cp = cp_model.CpModel()
        self._problem = problem
        self._horizon = problem.horizon()
        self._by_rank: list[list[cp_model.IntervalVar]] = [
            [] for _ in range(problem.placement.num_ranks)
        ]
        self._cells = [
            [self._make_cell(stage, mb) for mb in range(problem.num_microbatches)]
            for stage in range(problem.placement.num_stages)
        ]
        for intervals in self._by_rank:
            self.cp.add_no_overlap(intervals)
        self._keep_microbatches_in_order()
        self._let_inputs_arrive()
        for memory in problem.memory:
            self._limit_memory(memory)
        self.time = self.cp.new_int_var(0, self._horizon, "time")
        self._bound_time()
        self.cp.minimize(self.time)

    def _time(self) -> cp_model.IntVar:
        return self.cp.new_int_var(0, self._horizon, "")

    def _make_cell(self, stage: StageId, mb: MicrobatchId) -> _Cell:
        cp, problem = self.cp, self._problem
        is_fused = cp.new_bool_var("") if problem.may_fuse[stage] else cp.new_constant(0)
        forward_start = self._time()
        drop = self._make_drop(stage, mb, forward_start)
        cell = _Cell(forward_start, self._time(), self._time(), self._time(), is_fused, *drop)
        if problem.may_drop[stage]:
            again_end = cell.values_start + problem.recompute[stage][mb]
            cp.add(cell.backward_start >= again_end).only_enforce_if(cell.is_dropped)
        first, full = problem.backward_input[stage][mb], problem.backward[stage][mb]
        size = first + (full - first) * is_fused
        cp.add(cell.backward_start + size == cell.backward_end)
        cp.add(cell.weight_start >= cell.backward_end)
        weight = problem.backward_weight[stage][mb]
        self._by_rank[problem.placement.ranks[stage]] += [
            cp.new_fixed_size_interval_var(cell.forward_start, problem.forward[stage][mb], ""),
            cp.new_interval_var(cell.backward_start, size, cell.backward_end, ""),
            cp.new_optional_fixed_size_interval_var(cell.weight_start, weight, ~is_fused, ""),
        ]
        return cell

    def _make_drop(
        self, stage: StageId, mb: MicrobatchId, forward_start: cp_model.IntVar
    ) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        """Return `is_dropped` and `values_start`, with the time of R if there may be one."""
        cp, problem = self.cp, self._problem
        if not problem.may_drop[stage]:
            return cp.new_constant(0), forward_start
        is_dropped, values_start = cp.new_bool_var(""), self._time()
        forward_end = forward_start + problem.forward[stage][mb]
        cp.add(values_start >= forward_end).only_enforce_if(is_dropped)
        cp.add(values_start == forward_start).only_enforce_if(~is_dropped)
        self._by_rank[problem.placement.ranks[stage]].append(
            cp.new_optional_fixed_size_interval_var(
                values_start, problem.recompute[stage][mb], is_dropped, ""
            )
        )
        return is_dropped, values_start

    def _weight_end(self, stage: StageId, mb: MicrobatchId) -> cp_model.LinearExpr:
        """Return when W ends; a full backward counts as followed by a W that takes no time."""
        cell, weight = self._cells[stage][mb], self._problem.backward_weight[stage][mb]
        return cell.weight_start + weight - weight * cell.is_fused

    def _keep_microbatches_in_order(self) -> None:
        for stage, cells in enumerate(self._cells):
            for mb, later in (pair for group in self._problem.alike for pair in pairwise(group)):
                cell, after = cells[mb], cells[later]
                self.cp.add(after.forward_start >= self._forward_end(stage, mb))
                self.cp.add(after.backward_start >= cell.backward_end)
                self.cp.add(after.weight_start >= self._weight_end(stage, mb))
        for mb, later in (pair for group in self._problem.equal for pair in pairwise(group)):
            self.cp.add(self._cells[0][later].forward_start >= self._forward_end(0, mb))

    def _forward_end(self, stage: StageId, mb: MicrobatchId) -> cp_model.LinearExpr:
        return self._cells[stage][mb].forward_start + self._problem.forward[stage][mb]

    def _let_inputs_arrive(self) -> None:
        last = len(self._cells) - 1
        for mb, cell in enumerate(self._cells[last]):
            self.cp.add(cell.backward_start >= self._forward_end(last, mb))
        flows = list(self._flows())
        for flow in flows:
            for send, need in zip(flow.sends, flow.needs, strict=True):
                self.cp.add(need >= send + flow.delay)
        for slow in flows:
            for quick in flows:
                if slow.channel == quick.channel and slow.delay > quick.delay:
                    self._forbid_overtaking(slow, quick)

    def _flows(self) -> Iterator["_Flow"]:
        problem = self._problem
        for edge, (a, b) in enumerate(pairwise(problem.placement.ranks)):
            here, there = self._cells[edge], self._cells[edge + 1]
            yield _Flow(
                channel=(a, b),
                delay=problem.delay[edge],
                sends=[self._forward_end(edge, mb) for mb in range(len(here))],
                needs=[cell.forward_start for cell in there],
            )
            yield _Flow(
                channel=(b, a),
                delay=problem.delay[edge],
                sends=[cell.backward_end for cell in there],
                needs=[cell.backward_start for cell in here],
            )

    def _forbid_overtaking(self, slow: "_Flow", quick: "_Flow") -> None:
        """Require that a message sent after one with a longer delay arrives no earlier than it."""
        for early in slow.sends:
            for late, need in zip(quick.sends, quick.needs, strict=True):
                is_behind = self.cp.new_bool_var("")
                self.cp.add(late > early).only_enforce_if(is_behind)
                self.cp.add(need >= early + slow.delay).only_enforce_if(is_behind)
                self.cp.add(late < early).only_enforce_if(~is_behind)

    def _limit_memory(self, memory: RankMemory) -> None:
        """Count an activation from the start of F to the end of I or B, then what W needs.

        If it is dropped, all but its inputs counts from the start of R.

        To that comes what each action needs while it runs. Intervals exclude their end: memory
        that is freed at a time can be used by what starts then.
        """
        cp, intervals, demands = self.cp, [], []
        for stage in memory.after_forward:
            for mb, cell in enumerate(self._cells[stage]):
                weight = self._problem.backward_weight[stage][mb]
                until, dropped = cell.backward_end, 0
                if self._problem.may_drop[stage]:
                    dropped = memory.after_dropping[stage][mb]
                    intervals.append(
                        cp.new_interval_var(cell.forward_start, self._time(), until, "")
                    )
                    demands.append(dropped)
                intervals += [
                    cp.new_interval_var(cell.values_start, self._time(), until, ""),
                    cp.new_optional_interval_var(
                        cell.backward_end,
                        self._time(),
                        cell.weight_start + weight,
                        ~cell.is_fused,
                        "",
                    ),
                ]
                kept = memory.after_forward[stage][mb] - dropped
                demands += [kept, memory.after_input[stage][mb]]
                for extra, running in zip(
                    memory.extra[stage], self._running(stage, mb), strict=True
                ):
                    if extra[mb] > 0:
                        intervals.append(running)
                        demands.append(extra[mb])
        cp.add_cumulative(intervals, demands, memory.cap)

    def _running(self, stage: StageId, mb: MicrobatchId) -> Iterator[cp_model.IntervalVar]:
        """Yield the times of F, I, W and B; I and W, or B, are absent.

        If forwards may be recomputed, also those of an F that is dropped, and of R; or F is absent.
        """
        problem, interval = self._problem, self.cp.new_optional_fixed_size_interval_var
        cell = self._cells[stage][mb]
        forward, is_split = problem.forward[stage][mb], ~cell.is_fused
        yield interval(cell.forward_start, forward, ~cell.is_dropped, "")
        yield interval(cell.backward_start, problem.backward_input[stage][mb], is_split, "")
        yield interval(cell.weight_start, problem.backward_weight[stage][mb], is_split, "")
        yield interval(cell.backward_start, problem.backward[stage][mb], cell.is_fused, "")
        if problem.may_drop[stage]:
            yield interval(cell.forward_start, forward, cell.is_dropped, "")
            yield interval(cell.values_start, problem.recompute[stage][mb], cell.is_dropped, "")

    def _bound_time(self) -> None:
        """Bound `time` by each rank's last end, and by its head plus its work."""
        problem, heads = self._problem, self._problem.heads()
        for rank, offset in enumerate(problem.offsets):
            stages = problem.placement.stages_of(rank)
            work: list[cp_model.LinearExprT] = []
            for stage in stages:
                for mb, cell in enumerate(self._cells[stage]):
                    full = problem.backward[stage][mb]
                    halves = problem.backward_input[stage][mb] + problem.backward_weight[stage][mb]
                    saving = (halves - full) * cell.is_fused
                    work.append(problem.forward[stage][mb] + halves - saving)
                    work.append(problem.recompute[stage][mb] * cell.is_dropped)
            first = self._first_start(stages[0]) if problem.starts_count else offset
            for stage in stages:
                for group in problem.alike:
                    self.cp.add(self.time + first >= self._weight_end(stage, group[-1]))
            head = 0 if problem.starts_count else heads[stages[0]]
            self.cp.add(self.time + offset >= head + sum(work))
            for group in problem.alike:
                self.cp.add(self._cells[stages[0]][group[0]].forward_start >= heads[stages[0]])

    def _first_start(self, stage: StageId) -> cp_model.IntVar:
        """Return when the first stage of a rank first starts: as soon as its input is there."""
        first, is_first = self._time(), []
        for group in self._problem.alike:
            cell = self._cells[stage][group[0]]
            chosen = self.cp.new_bool_var("")
            arrival: cp_model.LinearExprT = 0
            if stage > 0:
                arrival = self._forward_end(stage - 1, group[0]) + self._problem.delay[stage - 1]
            self.cp.add(cell.forward_start == first).only_enforce_if(chosen)
            self.cp.add(first == arrival).only_enforce_if(chosen)
            self.cp.add(cell.forward_start >= first)
            is_first.append(chosen)
        self.cp.add_exactly_one(is_first)
        return first

    def hint(self, schedule: Schedule) -> None:
        """Start the search from `schedule`, which has no communication and no overlaps."""
        problem = self._problem
        timed = sorted(
            simulate(self._split_what_must_be(schedule), problem.as_costs()).actions(),
            key=lambda entry: entry.start,
        )
        for stage in range(len(self._cells)):
            for group in problem.alike:
                own = [
                    entry
                    for entry in timed
                    for part in compute_parts(entry.action)
                    if part.stage == stage and part.mb in group
                ]
                self._hint_group(stage, group, own)

    def _hint_group(
        self, stage: StageId, group: Sequence[MicrobatchId], own: Sequence[TimedAction]
    ) -> None:
        """Give the times of actions of alike microbatches to them in their order."""
        problem = self._problem
        forwards = [entry for entry in own if isinstance(entry.action, Forward)]
        backwards = [entry for entry in own if isinstance(entry.action, URGENT_BACKWARD_TYPES)]
        weights = [entry.start for entry in own if isinstance(entry.action, BackwardWeight)]
        again = {one.action.mb: one.start for one in own if isinstance(one.action, Recompute)}
        weight_end = 0.0
        for mb, forward, backward in zip(group, forwards, backwards, strict=True):
            cell = self._cells[stage][mb]
            is_fused = isinstance(backward.action, Backward)
            weight = max(backward.end, weight_end) if is_fused else weights.pop(0)
            weight_end = weight + (0 if is_fused else problem.backward_weight[stage][mb])
            values = {"forward_start": forward.start, "weight_start": weight}
            values |= {"backward_start": backward.start, "backward_end": backward.end}
            if problem.may_fuse[stage]:  # Otherwise it is a constant.
                values["is_fused"] = is_fused
            if problem.may_drop[stage]:
                own_mb = compute_parts(backward.action)[0].mb
                values["is_dropped"] = own_mb in again
                values["values_start"] = again.get(own_mb, forward.start)
            for name, value in values.items():
                self.cp.add_hint(getattr(cell, name), round(value))

    def _split_what_must_be(self, schedule: Schedule) -> Schedule:
        """Return the schedule with each full backward split on stages that may not fuse."""
        orders: list[list[Action]] = []
        for order in schedule.orders:
            orders.append([])
            for action in order:
                match action:
                    case Backward(stage, mb) if not self._problem.may_fuse[stage]:
                        orders[-1] += [BackwardInput(stage, mb), BackwardWeight(stage, mb)]
                    case _:
                        orders[-1].append(action)
        return Schedule(orders, schedule.placement, schedule.num_microbatches)

    def read(self, value: Callable[[cp_model.IntVar], int]) -> Schedule:
        """Return the schedule of a solution; `value` returns the value of a variable."""
        problem = self._problem
        timed: list[list[tuple[int, Action]]] = [[] for _ in problem.offsets]
        for stage, cells in enumerate(self._cells):
            order = timed[problem.placement.ranks[stage]]
            for mb, cell in enumerate(cells):
                is_fused = value(cell.is_fused)
                kind = Backward if is_fused else BackwardInput
                order.append((value(cell.forward_start), Forward(stage, mb)))
                order.append((value(cell.backward_start), kind(stage, mb)))
                if not is_fused:
                    order.append((value(cell.weight_start), BackwardWeight(stage, mb)))
                if value(cell.is_dropped):
                    order.append((value(cell.values_start), Recompute(stage, mb)))
        orders = [[action for _, action in sorted(order, key=itemgetter(0))] for order in timed]
        return Schedule(orders, problem.placement, problem.num_microbatches)


class _Flow(NamedTuple):
    """The activations or gradients that pass between two stages, one for each microbatch."""

    channel: tuple[Rank, Rank]
    delay: int
    sends: list[cp_model.LinearExprT]
    needs: list[cp_model.IntVar]
