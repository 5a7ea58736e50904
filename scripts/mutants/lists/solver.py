"""The search, its bounds, and the exact solver."""

BOUNDS = "tests/solver/test_bounds.py"
IN_MEMORY = "tests/solver/test_work_in_memory.py"
ENDINGS = "tests/solver/test_endings.py"
EVALUATE = "tests/solver/test_evaluate.py"
DISPATCH = "tests/solver/test_dispatch.py"
ANNEAL = "tests/solver/test_anneal.py"
PROBLEM = "tests/solver/test_problem.py"
EXACT = "tests/solver/test_exact.py"
GATHERED = "tests/solver/test_gathered_search.py"
TESTS = "tests/solver/test_search.py"
UNEVEN = "tests/solver/test_uneven.py"
DROPS = "tests/solver/test_recomputing_search.py -k"
RUN_AND_FIT = f"{DROPS} run_and_fit"
WINDOW = "tests/solver/test_window_bounds.py"
MUTANTS = [
    # Bounds that are too high, or lower than they could be.
    ("solver/bounds.py", "max(1.0, room / kept)", "max(1.0, room / kept - 1)", BOUNDS),
    (
        "solver/bounds.py",
        "cap - extra - (mb + 1 - inputs) * kept",
        "cap - extra - (mb + 2 - inputs) * kept",
        BOUNDS,
    ),
    (
        "solver/bounds.py",
        "min(durations[4 * s + INPUT] + durations[4 * s + WEIGHT], durations[4 * s + FULL])\n"
        "            - self.input[s]",
        "durations[4 * s + WEIGHT]",
        BOUNDS,
    ),
    ("solver/bounds.py", "time - saving * min(time, longest[self.ranks[s]])", "time", BOUNDS),
    ("solver/bounds.py", "            + mb * own\n", "            + (mb + 1) * own\n", BOUNDS),
    (
        "solver/bounds.py",
        "heads.append(sent + work.problem.delays[stage - 1])",
        "heads.append(sent)",
        BOUNDS,
    ),
    (
        "solver/bounds.py",
        "between = (mb - ahead) * own + needed",
        "between = mb * own + needed",
        BOUNDS,
    ),
    ("solver/bounds.py", "+ mb * work.input[stage]", "+ (mb + 1) * work.input[stage]", BOUNDS),
    (
        "solver/bounds.py",
        "blocked = max(blocked, left - ahead)",
        "blocked = max(blocked, left - ahead + 1)",
        BOUNDS,
    ),
    (
        "solver/bounds.py",
        "behind = (left - 1) * work.forward[stage]",
        "behind = left * work.forward[stage]",
        BOUNDS,
    ),
    (
        "solver/bounds.py",
        "behind = (left - 1) * work.input[stage]",
        "behind = left * work.input[stage]",
        BOUNDS,
    ),
    ("solver/bounds.py", "end = -work.problem.offsets[rank]", "end = 0.0", BOUNDS),
    ("solver/bounds.py", "            if mb >= ahead:", "            if mb > ahead:", BOUNDS),
    ("solver/bounds.py", "        if freeing > 0:", "        if freeing < 0:", BOUNDS),
    (
        "solver/bounds.py",
        "self.input[last][0] + before - self._before_backwards[last]",
        "first + before",
        BOUNDS,
    ),
    (
        "solver/work_in_memory.py",
        "excess = (mb + 1) * self._held[index]",
        "excess = (mb + 2) * self._held[index]",
        IN_MEMORY,
    ),
    (
        "solver/work_in_memory.py",
        "room = max(0.0, self._cap - extra - self._held[index])",
        "room = max(0.0, self._cap - extra - 2 * self._held[index])",
        IN_MEMORY,
    ),
    (
        "solver/work_in_memory.py",
        "sorted(pending, key=_freed_per_time, reverse=True)",
        "pending",
        IN_MEMORY,
    ),
    # New endings.
    ("solver/endings.py", "latest = min(latest, own)", "latest = own", ENDINGS),
    (
        "solver/endings.py",
        "if stage == stages[0] else -inf",
        "if stage == stages[-1] else -inf",
        ENDINGS,
    ),
    ("solver/endings.py", "return max(index for", "return -1 + max(index for", ENDINGS),
    # Times and memory of orders.
    (
        "solver/evaluation.py",
        "gradients[stage - 1][place] = now + delays[stage - 1]",
        "gradients[stage - 1][place] = now",
        EVALUATE,
    ),
    (
        "solver/evaluation.py",
        "activations[stage + 1][place] = now + delays[stage]",
        "activations[stage + 1][place] = now",
        EVALUATE,
    ),
    ("solver/evaluation.py", "cause.append(sources[stage][place])", "cause.append(None)", EVALUATE),
    (
        "solver/evaluation.py",
        "        if held + rise > most:\n            most = held + rise\n",
        "        if held + net > most:\n            most = held + net\n",
        EVALUATE,
    ),
    ("solver/evaluation.py", "return peak < inf and peak <=", "return peak <=", EVALUATE),
    (
        "solver/evaluation.py",
        "            if pending[stage] < 0:\n                return inf\n",
        "",
        EVALUATE,
    ),
    ("solver/evaluation.py", "end - start for", "end for", EVALUATE),
    (
        "solver/evaluation.py",
        "starts[rank] = activations[stage][own_forwards[stage][0]]",
        "pass",
        UNEVEN,
    ),
    (
        "solver/evaluation.py",
        "elif kind != WEIGHT and place not in forwards[code >> 2]:",
        "elif False:",
        UNEVEN,
    ),
    # Ranks that choose.
    (
        "solver/dispatching.py",
        "if waiting and held + needs[index + 1] > self.caps[rank]:",
        "if waiting and held > self.caps[rank]:",
        DISPATCH,
    ),
    (
        "solver/dispatching.py",
        "index - self.inputs[stage] >= self.policy.ahead[stage]",
        "index - self.inputs[stage] > self.policy.ahead[stage]",
        DISPATCH,
    ),
    ("solver/dispatching.py", "if self._rise_of_weights(rank) > room:", "if False:", DISPATCH),
    (
        "solver/dispatching.py",
        "if self._needed_by_backwards(rank, stage) > room + self.pending[rank]:",
        "if False:",
        DISPATCH,
    ),
    ("solver/dispatching.py", "if wanted == first and room >= rise:", "if False:", DISPATCH),
    (
        "solver/dispatching.py",
        "if now + duration - next_arrival <= self.policy.patience[rank] * duration:",
        "if True:",
        DISPATCH,
    ),
    ("solver/dispatching.py", "heapq.heappush(free, (now, ranks[receiver]))", "pass", DISPATCH),
    ("solver/dispatch_policies.py", "_KINDS if can_fuse else _KINDS[:2]", "_KINDS", DISPATCH),
    ("solver/dispatch_policies.py", "policy.ahead, least=1", "policy.ahead, least=0", DISPATCH),
    # Moves.
    (
        "solver/annealing.py",
        "    return moved if fits(problem, rank, moved) else None\n\n\ndef _choose_target",
        "    return moved\n\n\ndef _choose_target",
        ANNEAL,
    ),
    (
        "solver/annealing.py",
        "Walk(list(current), 0, True, problem), timing.time\n        else",
        "Walk(current, 0, True, problem), timing.time\n        else",
        ANNEAL,
    ),
    (
        "solver/annealing.py",
        "if timing.time < best_time * (1 - 1e-12) and",
        "if timing.cost < cost and",
        ANNEAL,
    ),
    ("solver/annealing.py", "if best_time <= goal:", "if best_time < goal:", ANNEAL),
    (
        "solver/annealing.py",
        "return (changed, moved) if fits(changed, rank, moved) else None",
        "return changed, moved",
        UNEVEN,
    ),
    (
        "solver/uneven_moves.py",
        "row.insert(turn + passed if target > index else turn - passed, row.pop(turn))",
        "row.insert(0, row.pop(turn))",
        UNEVEN,
    ),
    (
        "solver/uneven_moves.py",
        "turns[place] = turn",
        "turns[turn] = place",
        UNEVEN,
    ),
    (
        "solver/recomputed_orders.py",
        "forward_places[stage][forwards[stage]]",
        "forwards[stage]",
        UNEVEN,
    ),
    (
        "solver/uneven_moves.py",
        "not (problem.forwards or problem.backwards)",
        "not problem.backwards",
        UNEVEN,
    ),
    ("solver/annealing.py", "replace(named[0], caps=problem.caps), named[1]", "named", UNEVEN),
    # The search.
    ("solver/searching.py", "if problem.find_shortage() is None]", "]"),
    ("solver/search_state.py", "finalists = list(self._registered)", "finalists = []"),
    (
        "solver/search_state.py",
        "        if fits:\n            self._registered",
        "        if True:\n            self._registered",
    ),
    (
        "solver/search_state.py",
        "bound = min(self._bounds.values())",
        "bound = max(self._bounds.values())",
    ),
    (
        "solver/search_state.py",
        "code & 3 == FULL and not problem.fuses(code >> 2):",
        "code & 3 == FULL:",
    ),
    ("solver/problem_checks.py", "or not 0 < value < inf:", "or not 0 <= value < inf:"),
    ("solver/search_state.py", "if time.monotonic() > self._deadline:", "if False:"),
    ("solver/search_state.py", "round(self._effort * min(", "round(min("),
    ("solver/search_result.py", "return inf if self.time > 0 else 0.0", "return 0.0"),
    # Gathers.
    (
        "solver/gathered_search.py",
        "if name != SAFE and time.monotonic() > start + seconds:",
        "if False:",
        GATHERED,
    ),
    ("solver/gathered_search.py", "not placed.fits, float(", "float(", GATHERED),
    ("solver/gathered_search.py", "aheads.append(2 * max(aheads))", "break", GATHERED),
    # Problems.
    ("solver/problem.py", "0.0 if ranks[edge] == ranks[edge + 1] else delay", "delay", PROBLEM),
    (
        "solver/problem.py",
        "f + d for f, d in zip(forwards, (*self.delays_of(first), 0.0), strict=True)",
        "f for f in forwards",
        PROBLEM,
    ),
    (
        "solver/problem.py",
        "needed = max(forward.rise, forward.net + needed)",
        "needed = max(forward.rise, needed)",
        PROBLEM,
    ),
    (
        "solver/problem_checks.py",
        "max(first_stages) >= num_ranks:",
        "max(first_stages) > num_ranks:",
        PROBLEM,
    ),
    (
        "solver/problem.py",
        "return waiting.pop(0)",
        "return waiting.pop()",
        PROBLEM,
    ),
    (
        "solver/problem.py",
        "return is_quicker or self.saves_memory(stage)",
        "return is_quicker",
        PROBLEM,
    ),
    (
        "solver/registered_schedules.py",
        "if num_microbatches < generator.min_microbatches(shape):\n            continue",
        "if False:\n            continue",
        "tests/solver/test_best_schedule.py tests/solver/test_search.py",
    ),
    (
        "solver/best_schedule.py",
        "lower_bound=min(one.lower_bound for one in found)",
        "lower_bound=max(one.lower_bound for one in found)",
        "tests/solver/test_best_schedule.py",
    ),
    (
        "solver/best_schedule.py",
        "failures.append(error)",
        "raise",
        "tests/solver/test_best_schedule.py",
    ),
    # Schedules to begin with.
    (
        "solver/safe_schedules.py",
        "return round(report.peak_memory, 9), report.makespan",
        "return report.makespan, round(report.peak_memory, 9)",
        "tests/runtime/test_next_schedule.py",
    ),
    (
        "solver/safe_schedules.py",
        "        for stage in reversed(stages):\n",
        "        for stage in stages:\n",
        EXACT,
    ),
    (
        "solver/safe_schedules.py",
        "join_backward(part_overlaps(schedule))",
        "part_overlaps(schedule)",
        "tests/solver/test_safe_schedules.py",
    ),
    # The exact solver.
    (
        "solver/exact/constraint_model.py",
        "cp.add(cell.weight_start >= cell.backward_end)",
        "cp.add(cell.weight_start >= 0)",
        EXACT,
    ),
    (
        "solver/exact/constraint_model.py",
        "self.cp.add(need >= send + flow.delay)",
        "self.cp.add(need >= send)",
        EXACT,
    ),
    (
        "solver/exact/constraint_model.py",
        "if slow.channel == quick.channel and slow.delay > quick.delay:",
        "if False:",
        EXACT,
    ),
    (
        "solver/exact/constraint_model.py",
        "demands += [kept, memory.after_input[stage][mb]]",
        "demands += [kept, 0]",
        EXACT,
    ),
    ("solver/exact/constraint_model.py", "if extra[mb] > 0:", "if False:", EXACT),
    ("solver/exact/constraint_model.py", "+ halves - saving)", "+ halves)", EXACT),
    (
        "solver/exact/constraint_model.py",
        "self.cp.add(self.time + offset >= head + sum(work))",
        "self.cp.add(self.time >= head + sum(work))",
        EXACT,
    ),
    (
        "solver/exact/ticks.py",
        "total + 2 * self.num_microbatches * sum(self.delay)",
        "total + self.num_microbatches * sum(self.delay)",
        EXACT,
    ),
    ("solver/exact/ticks.py", "ceil(ticks - 1e-6) - self.num_instant", "ceil(ticks - 1e-6)", EXACT),
    ("solver/exact/whole_units.py", "floor(share * most) for", "round(share * most) for", EXACT),
    (
        "solver/exact/incumbent.py",
        "if is_better and self._problem.find_excess(report) is None:",
        "if is_better:",
        EXACT,
    ),
    ("solver/exact/incumbent.py", "if bound > self.lower_bound and", "if", EXACT),
    ("solver/exact/incumbent.py", " and not self.is_restricted:", ":", f"{EXACT} -k every_order"),
    ("solver/exact/solution.py", "if time > 0 and a != b:", "if time > 0:", EXACT),
    # Microbatches that differ.
    (
        "solver/uneven_bounds.py",
        "room = problem.caps[rank] * ROUNDING - (more + rise) * self._sizes[1]",
        "room = problem.caps[rank] * ROUNDING - (more + rise) * self._sizes[-1]",
        UNEVEN,
    ),
    ("solver/uneven_bounds.py", "accumulate(sorted(values)", "accumulate(values", UNEVEN),
    (
        "solver/dispatching.py",
        "if left + needs[index + 1] * self.sizes[oldest] > self.caps[rank]:",
        "if left + needs[index + 1] > self.caps[rank]:",
        UNEVEN,
    ),
    (
        "solver/problem.py",
        "offsets=self._offsets(self.sequence[places[0]]),",
        "offsets=self.offsets,",
        UNEVEN,
    ),
    # Forwards that are recomputed.
    (
        "solver/recomputed_orders.py",
        "if place not in done[stage]:  #",
        "if False:  #",
        f"{DROPS} out_of_place",
    ),
    (
        "solver/recomputed_orders.py",
        "rise, net = problem.dropping[stage] if is_dropped else changes[code]",
        "rise, net = changes[code]",
        f"{DROPS} last_backward",
    ),
    (
        "solver/recomputed_orders.py",
        "        yield held + rise * size\n",
        "        yield held + rise\n",
        RUN_AND_FIT,
    ),
    ("solver/recomputed_orders.py", "max(candidates, key=_backward)", "candidates[0]", DROPS[:-3]),
    ("solver/recomputed_orders.py", "if not candidates or most == 0:", "if most == 0:", DROPS[:-3]),
    (
        "solver/recomputing_dispatch.py",
        "return change.times(self.sizes[place])",
        "return change",
        RUN_AND_FIT,
    ),
    (
        "solver/recomputing_dispatch.py",
        "        return needed * self.sizes[mb], -net * self.sizes[mb]\n",
        "        return needed, -net\n",
        RUN_AND_FIT,
    ),
    (
        "solver/recomputing_dispatch.py",
        "            if needed > room:\n",
        "            if False:\n",
        RUN_AND_FIT,
    ),
    (
        "solver/recomputing_dispatch.py",
        "return self.waiting[stage][0]",
        "return self.inputs[stage] - len(self.waiting[stage])",
        RUN_AND_FIT,
    ),
    (
        "solver/recomputing_moves.py",
        "return changed if changed != order and fits(problem, rank, changed) else None",
        "return changed if changed != order else None",
        RUN_AND_FIT,
    ),
    (
        "solver/annealing.py",
        "best_time * (1 - 1e-12) and price == 0:",
        "best_time * (1 - 1e-12):",
        f"{DROPS} leeway",
    ),
    (
        "solver/recomputing_bounds.py",
        "works = busy + recomputed * self.time",
        "works = busy + 2 * recomputed * self.time",
        f"{DROPS} weighs",
    ),
    (
        "solver/recomputing_bounds.py",
        "return floor(min(most, (self.room + recomputed * self.saved) / self.kept))",
        "return floor(min(most, self.room / self.kept))",
        f"{DROPS} weighs",
    ),
    ("solver/recomputing_bounds.py", "starts[-1][-1] + tail", "starts[-1][-1]", f"{DROPS} weighs"),
    ("solver/window_bounds.py", "self._after - self._last_forward,", "self._after,", WINDOW),
    (
        "solver/window_bounds.py",
        "max(self._begins, self._opens - forwards)",
        "self._opens",
        WINDOW,
    ),
    (
        "solver/window_bounds.py",
        "rests = [(rest, one.kept), (rest + again, held)]",
        "rests = [(rest, one.kept)]",
        f"{WINDOW} -k dropped_until",
    ),
    ("solver/highest_point.py", "(matrix[i][j] - 2 /", "(matrix[i][j] + 2 /", WINDOW),
    (
        "solver/exact/ticks.py",
        "ticks[stage - len(recompute) :: num_stages]",
        "ticks[stage - len(recompute) :]",
        "tests/solver/test_recomputing_certified.py -k exact_solver",
    ),
]
