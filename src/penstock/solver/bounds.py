"""Lower bounds on the time of any schedule.

Every bound here is about schedules whose microbatches are in order on each stage, in F, in I and in
W; `solver.problem` shows that one of these is among the best, if microbatches are alike. If they
differ, `solver.uneven_bounds` has the bound. Time is by the problem's clock: the
largest end of a rank minus its offset.

An action is bounded from both sides. Its *head* is a time before which it cannot start. Its *tail*
is a time that must pass between its end and the end of the step. So head + duration + tail is a
bound for each action. All actions of a rank together give another, since they cannot run at once.
"""

from math import ceil, floor, inf

from penstock.passes.held_memory import ROUNDING
from penstock.solver.jackson import longest_tail_first
from penstock.solver.named_codes import FORWARD, FULL, INPUT, WEIGHT
from penstock.solver.problem import Problem
from penstock.solver.recomputing_bounds import trade_off, without_recomputing
from penstock.solver.uneven_bounds import uneven_bound
from penstock.solver.window_bounds import window_bound
from penstock.solver.work_in_memory import RankWork, StageWork


def lower_bound(problem: Problem) -> float:
    """Return a time that no schedule for `problem` can beat, by its clock.

    [1] All actions of a rank must run between their heads and tails: see `_one_rank`.
    [2] Heads and tails follow from what an action waits for, from what its rank must run before
        or after it, and from memory: see `_Heads` and `_Tails`.

    If forwards may be recomputed, see `recomputing_bounds`.
    """
    if problem.may_recompute:
        relaxed = lower_bound(without_recomputing(problem))
        return max(relaxed, trade_off(problem), window_bound(problem))
    if problem.sequence:  # Microbatches differ, and none of this holds for every order of them.
        return max(uneven_bound(problem), window_bound(problem))
    work = _Amount(problem)
    heads, tails = _Heads(work), _Tails(work)
    return max(_one_rank(work, rank, heads, tails) for rank in range(problem.num_ranks))


def latest_inputs(problem: Problem, target: float) -> list[list[float]]:
    """Return when I must start at the latest for an end at `target`, by stage and microbatch."""
    work = _Amount(problem)
    tails = _Tails(work).input
    return [[target - work.input[stage] - tail for tail in row] for stage, row in enumerate(tails)]


class _Amount:
    """The least time that actions take, and the limits that memory puts on their order.

    A full backward may be quicker than its halves, and an overlap quicker than its two parts. So
    let I take the lesser of I and B, and let I and W together take the lesser of I + W and B. Let
    F take what is left of it if it overlaps the longest backward of its rank.

    Replace each full backward by such halves, and each overlap by such an F and then the backward.
    Nothing ends later than before, so no message arrives later. The arguments about memory below
    use only what is held when an F or a backward starts, and what an I or B needs at least. No F
    starts between the halves, and the F of an overlap is counted before its backward frees
    anything, so these amounts stay the same. So a bound for schedules without full backwards and
    overlaps is a bound for all schedules.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_microbatches = problem.num_microbatches
        durations, saving = problem.durations, problem.costs.overlap_saving
        stages = range(problem.num_stages)
        self.ranks = problem.placement.ranks
        longest = [
            max(max(durations[4 * s + INPUT], durations[4 * s + FULL]) for s in held)
            for held in problem.stages_of
        ]
        self.forward = [
            time - saving * min(time, longest[self.ranks[s]])
            for s, time in enumerate(durations[FORWARD::4])
        ]
        self.input = [min(durations[4 * s + INPUT], durations[4 * s + FULL]) for s in stages]
        self.weight = [
            min(durations[4 * s + INPUT] + durations[4 * s + WEIGHT], durations[4 * s + FULL])
            - self.input[s]
            for s in stages
        ]
        self._on_rank = [
            RankWork(list(map(self._of_stage, held)), self.num_microbatches, cap * ROUNDING)
            for held, cap in zip(problem.stages_of, problem.caps, strict=True)
        ]

    def _of_stage(self, stage: int) -> StageWork:
        return StageWork(
            forward=self.forward[stage],
            input=self.input[stage],
            weight=self.weight[stage],
            after_forward=self.problem.costs.after_forward[stage],
            after_input=self.problem.costs.after_input[stage],
        )

    def least_freeing(self, stage: int, mb: int) -> float:
        """Return the least time of what must be over to free memory for F of `mb`.

        That is all that its rank must have run, except for F on its stage and on earlier ones.
        """
        forward = self.problem.changes[4 * stage + FORWARD]
        rank, extra = self.ranks[stage], forward.rise - forward.net
        return self._on_rank[rank].least_freeing(len(self.earlier(stage)), mb, extra)

    def most_before(self, stage: int, mb: int) -> float:
        """Return the most time of what its rank can have run when I of `mb` starts."""
        rank, extra = self.ranks[stage], self._rise_of_input(stage)
        return self._on_rank[rank].most_before(len(self.earlier(stage)), mb, extra)

    def all_on(self, rank: int) -> float:
        """Return the least time of all that a rank runs."""
        return self._on_rank[rank].total

    def most_ahead(self, stage: int, other: int) -> int:
        """Return how many microbatches ahead F on `stage` must wait for I on `other`.

        `other` is `stage` or a later stage on its rank. From the start of its F to the end of its
        I on `other`, a microbatch holds what the F of all stages of the rank up to `other` have
        left. Each microbatch that has begun F on `stage` since then holds the part up to `stage`.
        F of microbatch j + most_ahead is one too many, so it cannot come between F and I of
        microbatch j on `other`. It cannot come before that F either, because that F would then be
        one too many. So it comes after that I. Too many are those that leave no room for the I,
        which runs while they are held.
        """
        cap = self.problem.caps[self.ranks[stage]]
        kept = self.kept_up_to(stage)
        if cap == inf or kept == 0:
            return self.num_microbatches
        room = cap * ROUNDING - (self.kept_up_to(other) - kept) - self._rise_of_input(other)
        # `kept` may be so small that the quotient is infinite.
        return floor(min(self.num_microbatches, max(1.0, room / kept)))

    def least_before(self, stage: int, mb: int) -> float:
        """Return the least time of I and W on `stage` that must be over when its F of `mb` starts.

        With `a` microbatches past I and `b` past W, the rank holds at least (mb + 1 - a) times what
        F left and a - b times what I left. The result is the least a * I + b * W that fits.
        """
        cap = self.problem.caps[self.ranks[stage]] * ROUNDING
        if cap == inf:
            return 0.0
        kept, left = self.kept_up_to(stage), self.problem.costs.after_input[stage]
        forward = self.problem.changes[4 * stage + FORWARD]
        extra = forward.rise - forward.net  # What the F itself needs while it runs.
        least = inf
        for inputs in range(max(0, mb + 1 - self.most_ahead(stage, stage)), mb + 1):
            room = cap - extra - (mb + 1 - inputs) * kept
            needed = inputs - room / left - 1e-9 if left > 0 else 0.0
            weights = ceil(min(self.num_microbatches, max(0.0, needed)))
            least = min(least, inputs * self.input[stage] + weights * self.weight[stage])
            if weights == 0:
                break  # More would only take longer.
        return least

    def _rise_of_input(self, stage: int) -> float:
        """Return what an I or B of `stage` needs at least while it runs."""
        return min(self.problem.changes[4 * stage + kind].rise for kind in (INPUT, FULL))

    def kept_up_to(self, stage: int) -> float:
        """Return what F on `stage` and earlier stages of its rank leave of a microbatch."""
        return sum(self.problem.costs.after_forward[s] for s in (*self.earlier(stage), stage))

    def earlier(self, stage: int) -> list[int]:
        """Return the stages before `stage` on its rank."""
        return [s for s in self.problem.stages_of[self.ranks[stage]] if s < stage]

    def later(self, stage: int) -> list[int]:
        """Return the stages after `stage` on its rank."""
        return [s for s in self.problem.stages_of[self.ranks[stage]] if s > stage]


class _Heads:
    """The earliest starts of F and I: `forward[stage][mb]` and `input[stage][mb]`.

    An action waits for
    [1] the same action of the previous microbatch;
    [2] its input from the neighbouring stage;
    [3] for an F, the I that must be over before there is memory for it;
    [4] all that its rank must run before it, counted from when the rank can first start. For an F:
        the F up to its microbatch on its stage and the earlier ones, and the I and W that memory
        requires. For an I: the F of all stages up to its microbatch, and the I up to it;
    [5] for an F that must come after I of microbatch 0, here or on a later stage of its rank: what
        the rank must run in between, which is all of [4] except the F that may come before that I;
    [6] for an F that needs memory which backwards free: the same from the rank's first backward on,
        which is I of microbatch 0 on its last stage, with the memory of all stages at once.
    """

    def __init__(self, work: _Amount) -> None:
        stages = range(work.problem.num_stages)
        self._work = work
        self._first = [0.0] * work.problem.num_stages
        for stage in stages[1:]:
            before = self._first[stage - 1] + work.forward[stage - 1]
            self._first[stage] = before + work.problem.delays[stage - 1]
        self._before_backwards = [work.most_before(stage, 0) for stage in stages]
        self.forward: list[list[float]] = [[] for _ in stages]
        self.input: list[list[float]] = [[] for _ in stages]
        self._ahead = [
            [(other, work.most_ahead(stage, other)) for other in (stage, *work.later(stage))]
            for stage in stages
        ]
        for mb in range(work.num_microbatches):
            for stage in stages:
                self.forward[stage].append(self._forward(stage, mb))
            for stage in reversed(stages):
                self.input[stage].append(self._input(stage, mb))

    def _forward(self, stage: int, mb: int) -> float:
        work, own = self._work, self._work.forward[stage]
        earlier, later = work.earlier(stage), work.later(stage)
        needed = work.least_before(stage, mb)
        # The number of microbatches that must be past I on each later stage.
        past = {other: max(0, mb + 1 - ahead) for other, ahead in self._ahead[stage]}
        first = self._first[(earlier or [stage])[0]]
        heads = [
            first
            + mb * own
            + (mb + 1) * sum(work.forward[s] for s in earlier)
            + needed
            + sum(past[s] * (work.forward[s] + work.input[s]) for s in later)  # [4]
        ]
        freeing = work.least_freeing(stage, mb)
        if freeing > 0:
            before = mb * own + (mb + 1) * sum(work.forward[s] for s in earlier) + freeing
            heads.append(first + before)  # [4]
            last = (later or [stage])[-1]
            heads.append(self.input[last][0] + before - self._before_backwards[last])  # [6]
        if mb > 0:
            heads.append(self.forward[stage][mb - 1] + own)  # [1]
        if stage > 0:
            sent = self.forward[stage - 1][mb] + work.forward[stage - 1]
            heads.append(sent + work.problem.delays[stage - 1])  # [2]
        for other, ahead in self._ahead[stage]:
            if mb >= ahead:
                heads.append(self.input[other][mb - ahead] + work.input[other])  # [3]
                between = (mb - ahead) * own + needed
                between += sum(past[s] * work.input[s] for s in later if s <= other)
                heads.append(self.input[other][0] + between)  # [5]
        return max(heads)

    def _input(self, stage: int, mb: int) -> float:
        work = self._work
        on_rank = work.problem.stages_of[work.ranks[stage]]
        heads = [
            self._first[on_rank[0]]
            + (mb + 1) * sum(work.forward[s] for s in on_rank)
            + (mb + 1) * sum(work.input[s] for s in work.later(stage))
            + mb * work.input[stage]  # [4]
        ]
        if mb > 0:
            heads.append(self.input[stage][mb - 1] + work.input[stage])  # [1]
        if stage == work.problem.num_stages - 1:
            heads.append(self.forward[stage][mb] + work.forward[stage])
        else:
            sent = self.input[stage + 1][mb] + work.input[stage + 1]
            heads.append(sent + work.problem.delays[stage])  # [2]
        return max(heads)


class _Tails:
    """The time that must pass after an F or I, minus the offset of the rank that ends last.

    The mirror image of `_Heads`: an action is followed by
    [1] the same action of the next microbatch;
    [2] the action that takes its message;
    [3] for an I, the F that can start only with the memory it frees;
    [4] all that its rank must still run: after an I, at least what it cannot have run before.
    """

    def __init__(self, work: _Amount) -> None:
        stages = range(work.problem.num_stages)
        self._work = work
        self._ahead = [
            [(other, work.most_ahead(other, stage)) for other in (*work.earlier(stage), stage)]
            for stage in stages
        ]
        self.forward = [[0.0] * work.num_microbatches for _ in stages]
        self.input = [[0.0] * work.num_microbatches for _ in stages]
        for mb in reversed(range(work.num_microbatches)):
            for stage in stages:
                self.input[stage][mb] = self._input(stage, mb)
            for stage in reversed(stages):
                self.forward[stage][mb] = self._forward(stage, mb)

    def _forward(self, stage: int, mb: int) -> float:
        work = self._work
        left = work.num_microbatches - mb
        rank = work.ranks[stage]
        behind = (left - 1) * work.forward[stage] + left * (
            sum(work.forward[s] for s in work.later(stage))
            + sum(work.input[s] + work.weight[s] for s in work.problem.stages_of[rank])
        )
        tails = [behind - work.problem.offsets[rank]]  # [4]
        if left > 1:
            tails.append(work.forward[stage] + self.forward[stage][mb + 1])  # [1]
        if stage == work.problem.num_stages - 1:
            tails.append(work.input[stage] + self.input[stage][mb])
        else:
            taken = work.forward[stage + 1] + self.forward[stage + 1][mb]
            tails.append(work.problem.delays[stage] + taken)  # [2]
        return max(tails)

    def _input(self, stage: int, mb: int) -> float:
        work = self._work
        left = work.num_microbatches - mb
        rank = work.ranks[stage]
        behind = (left - 1) * work.input[stage] + left * work.weight[stage]
        behind += left * sum(work.input[s] + work.weight[s] for s in work.earlier(stage))
        blocked = 0  # The number of F on the stages so far that must come after.
        for other, ahead in self._ahead[stage]:
            blocked = max(blocked, left - ahead)
            behind += blocked * work.forward[other]
        for other in work.later(stage):
            behind += blocked * (work.forward[other] + work.input[other] + work.weight[other])
        after = work.all_on(rank) - work.most_before(stage, mb) - work.input[stage]
        tails = [max(behind, after) - work.problem.offsets[rank]]  # [4]
        if left > 1:
            tails.append(work.input[stage] + self.input[stage][mb + 1])  # [1]
        if stage > 0:
            taken = work.input[stage - 1] + self.input[stage - 1][mb]
            tails.append(work.problem.delays[stage - 1] + taken)  # [2]
        for other, ahead in self._ahead[stage]:
            if left > ahead:
                tails.append(work.forward[other] + self.forward[other][mb + ahead])  # [3]
        return max(tails)


def _one_rank(work: _Amount, rank: int, heads: _Heads, tails: _Tails) -> float:
    """Return the least time of a rank that may interrupt its actions, by their heads and tails.

    It is best to run, at any time, the action with the longest tail among those whose head has
    passed (Jackson's rule). Every schedule is also allowed with interruptions, so none is faster.
    The W of a microbatch can start after its I; only the rank's end comes after it.
    """
    jobs: list[tuple[float, float, float]] = []
    end = -work.problem.offsets[rank]
    for stage in work.problem.stages_of[rank]:
        for mb in range(work.num_microbatches):
            forward_head, input_head = heads.forward[stage][mb], heads.input[stage][mb]
            weight_head = input_head + work.input[stage]
            jobs.append((forward_head, work.forward[stage], tails.forward[stage][mb]))
            jobs.append((input_head, work.input[stage], tails.input[stage][mb]))
            jobs.append((weight_head, work.weight[stage], end))
    return longest_tail_first(sorted(jobs))
