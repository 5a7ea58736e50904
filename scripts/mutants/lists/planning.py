"""Plans: numbers of microbatches, cuts, and the searches for each."""

LAYERS = "tests/planning/test_plan_of_layers.py"
CHOOSING = "tests/planning/test_choosing.py"
LEVELS = "tests/planning/test_plan_of_levels.py"
TABLE = "tests/planning/test_plan_of_a_table.py"
TESTS = "tests/planning/test_counts.py"
MUTANTS = [
    (
        "planning/microbatch_counts.py",
        "if num_ranks <= count <= most]",
        "if num_ranks < count <= most]",
    ),
    ("planning/microbatch_counts.py", "[*below[-1:], *above[:1]]", "[*below[:1], *above[:1]]"),
    ("planning/microbatch_counts.py", "range(1, isqrt(number) + 1)", "range(1, isqrt(number))"),
    (
        "planning/batch_layers.py",
        "factor = self.batch_size / num_microbatches / self.mb_size",
        "factor = self.batch_size / num_microbatches",
        LAYERS,
    ),
    (
        "planning/layer_source.py",
        "fixed = cost.parameter_bytes * bytes_per_parameter_byte",
        "fixed = cost.parameter_bytes",
        LAYERS,
    ),
    (
        "planning/layer_source.py",
        "backward=[2 * time + request.overhead for time in third]",
        "backward=[2 * (time + request.overhead) for time in third]",
        LAYERS,
    ),
    ("planning/layer_source.py", "cuts = cuts or [lightest.starts]", "cuts = [*cuts]", LAYERS),
    (
        "planning/layer_source.py",
        "levels = [(count,) * num_stages for count in (1, ceil(num_ranks / 2), num_ranks)]",
        "levels = [(1,) * num_stages]",
        LAYERS,
    ),
    (
        "planning/layer_source.py",
        "if rows and (cost.name in rows or not cost.name):",
        "if rows and not cost.name:",
        LAYERS,
    ),
    (
        "planning/stage_sources.py",
        "max(memory - fixed, one) for",
        "max(memory, one) for",
        LAYERS,
    ),
    ("planning/stage_sources.py", "part + (time - part) * factor", "part + time * factor", TABLE),
    (
        "planning/stage_sources.py",
        "max(delay, request.delay) for",
        "min(delay, request.delay) for",
        TABLE,
    ),
    (
        "planning/choosing.py",
        "if bounds[index] <= worst and",
        "if bounds[index] < min(times.values(), default=inf) and",
        CHOOSING,
    ),
    ("planning/choosing.py", "best = min(best, full, key=_rate)", "best = full", CHOOSING),
    (
        "planning/choosing.py",
        "times = {shape: found[0].result.time for",
        "times = {shape: found[0].result.lower_bound for",
        CHOOSING,
    ),
    ("planning/choosing.py", "quick[:_NUM_FINALISTS]", "quick[:1]", LEVELS),
    (
        "planning/level_source.py",
        "for levels in dict.fromkeys([lightest, *mixes]):",
        "for levels in dict.fromkeys(mixes):",
        LEVELS,
    ),
    (
        "planning/level_source.py",
        "mixes = _mixes(by_memory,",
        "mixes = _mixes(list(tables),",
        LEVELS,
    ),
    ("planning/level_source.py", "in (alone, waiting)", "in (alone,)", LEVELS),
    (
        "costs/memory_levels.py",
        "    if any(any(table.after_dropping) for table in chosen):",
        "    if False:",
        LEVELS,
    ),
    ("planning/planner.py", "while more and gathered.lacks_memory:", "while False:", LAYERS),
    ("planning/planner.py", "if batch_size % count:", "if count > batch_size:", LAYERS),
    ("planning/plan_table.py", "fixed + rank.peak_memory for", "rank.peak_memory for", LAYERS),
]
