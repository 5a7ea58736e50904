"""Actions, placements, schedules, and their text and drawing."""

TEXT = "tests/ir/test_csv_text.py"
TESTS = "tests/ir/test_schedule.py"
MUTANTS = [
    (
        "ir/action.py",
        "return (action.forward, action.backward)\n",
        "return (action.forward,)\n",
        "tests/ir/test_action.py",
    ),
    (
        "ir/action.py",
        "is_backward = isinstance(self.backward, Backward | BackwardInput)",
        "is_backward = not isinstance(self.backward, Forward)",
        "tests/ir/test_action.py",
    ),
    # Placements.
    ("ir/placement.py", "if leg % 2 == 0", "if leg == 0", "tests/ir/test_placement.py"),
    (
        "ir/placement.py",
        "range(min(max(ranks), len(ranks)))",
        "range(min(max(ranks), len(ranks)) - 1)",
        "tests/ir/test_placement.py",
    ),
    ("ir/placement.py", "if min(ranks) < 0:", "if min(ranks) < -1:", "tests/ir/test_placement.py"),
    # Text.
    ("ir/csv_text.py", "if first.line != line:", "if first.line > line:", TEXT),
    ("ir/csv_text.py", "if awaited not in started:", "if False:", TEXT),
    ("ir/csv_text.py", "            started.remove(awaited)", "            pass", TEXT),
    ("ir/csv_text.py", "num_microbatches=last_mb + 1", "num_microbatches=max(1, last_mb)", TEXT),
    ("ir/csv_text.py", "last_mb = max(last_mb, part.mb)", "last_mb = part.mb", TEXT),
    ("ir/csv_text.py", "while rows and not rows[-1]:", "if rows and not rows[-1]:", TEXT),
    ("ir/csv_text.py", "is_quoted = len(cell) >= 2 and", "is_quoted =", TEXT),
    ("ir/csv_text.py", 'text.removeprefix("\\ufeff")', "text", TEXT),
    (
        "ir/csv_text.py",
        "for stage in range(len(holder)):\n        if",
        "for stage in range(1, len(holder)):\n        if",
        TEXT,
    ),
    (
        "ir/csv_text.py",
        "for number, raw in enumerate(row, start=1):",
        "for number, raw in enumerate(row):",
        TEXT,
    ),
    # Excerpts and drawings.
    (
        "ir/excerpts.py",
        "position + _AROUND + 1",
        "position + _AROUND",
        "tests/ir/test_excerpts.py",
    ),
    ("ir/excerpts.py", "(last < len(order))", "(last <= len(order))", "tests/ir/test_excerpts.py"),
    ("ir/grid.py", "                start += 1\n", "", "tests/ir/test_grid.py"),
    ("ir/grid.py", "if is_compute(action):", "if True:", "tests/ir/test_grid.py"),
    # Schedules.
    ("ir/schedule.py", "Backward | BackwardWeight):", "BackwardWeight):"),
    (
        "ir/schedule.py",
        "if len(orders) != placement.num_ranks:",
        "if len(orders) < placement.num_ranks:",
    ),
    ("ir/schedule.py", "or num_microbatches < 1:", "or num_microbatches < 0:"),
    ("ir/schedule.py", "not kinds.isdisjoint(COMM_TYPES)", "kinds <= set(COMM_TYPES)"),
    (
        "ir/dataflow.py",
        "for source, target in sorted(pairs):",
        "for source, target in pairs:",
        "tests/ir/test_dataflow.py",
    ),
    (
        "ir/dataflow.py",
        "pairs += schedule.skips if skips is None else skips",
        "pairs += skips or ()",
        "tests/ir/test_dataflow.py",
    ),
    (
        "ir/message.py",
        "return self.taker < self.maker",
        "return self.taker > self.maker",
        "tests/ir/test_dataflow.py",
    ),
    (
        "ir/message.py",
        "return Skip(first, last) if last - first > 1 else None",
        "return Skip(first, last)",
        "tests/ir/test_dataflow.py",
    ),
    (
        "ir/walking.py",
        "if blocking and isinstance(action, Recv):",
        "if isinstance(action, Recv):",
        "tests/ir/test_walking.py",
    ),
    (
        "ir/walking.py",
        "delivered = tuple(key for key in delivered if not flow.is_sent(key))",
        "pass",
        "tests/ir/test_walking.py",
    ),
]
