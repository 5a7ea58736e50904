"""What stages cost."""

GIVEN = "tests/costs/test_given_costs.py"
TESTS = "tests/costs"
MUTANTS = [
    ("costs/cost_table.py", "share = 1 / stages_per_rank", "share = 1.0"),
    (
        "costs/cost_table.py",
        "num_edges = len(stages), max(len(stages) - 1, 0)",
        "num_edges = len(stages), len(stages)",
    ),
    ("costs/cost_table.py", "size / speed for", "size * speed for"),
    ("costs/cost_table.py", "0 <= value < math.inf,", "0 < value < math.inf,"),
    ("costs/cost_table.py", "0 <= value < math.inf,", "0 <= value <= math.inf,"),
    ("costs/cost_table.py", "fits, expected = value > 0,", "fits, expected = value >= 0,"),
    ("costs/plain_numbers.py", "return value if type(value) is int else as_float", "return value"),
    (
        "costs/lengths.py",
        "sum(map(work, documents)) / work(usual)",
        "work(sum(documents)) / work(usual)",
    ),
    ("costs/lengths.py", "count / usual for count", "work(count) / work(usual) for count"),
    ("costs/microbatch_scales.py", "if not 0 < value < inf:", "if not 0 <= value < inf:"),
    ("costs/microbatch_scales.py", "if num_scaled not in (None, num_microbatches):", "if False:"),
    (
        "costs/cost_table.py",
        "if math.inf in self.transfer:",
        "if False:",
        "tests/ir/test_user_mistakes.py",
    ),
    ("costs/json_format.py", 'if values.get("version") != self.version:', "if False:"),
    ("costs/given_costs.py", "Fraction(1, counts[rank]) for", "Fraction(1, 1) for", GIVEN),
    (
        "costs/given_costs.py",
        "Fraction(len(values), placement.num_ranks)",
        "Fraction(len(values), placement.num_stages)",
        GIVEN,
    ),
    ("costs/given_costs.py", "max(start, Fraction(part))", "start", GIVEN),
    ("costs/given_costs.py", "delay + transfer\n", "delay\n", GIVEN),
    ("costs/given_costs.py", "if ends[0] != ends[1]", "if True", GIVEN),
    (
        "costs/amounts.py",
        '{f"{letter}b": 1000**power',
        '{f"{letter}b": 1024**power',
        "tests/costs/test_amounts.py",
    ),
]
