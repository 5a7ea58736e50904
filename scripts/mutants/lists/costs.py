"""What stages cost."""

TESTS = "tests/costs"
MUTANTS = [
    ("costs/cost_table.py", "share = 1 / stages_per_rank", "share = 1.0"),
    (
        "costs/cost_table.py",
        "num_edges = len(stages), max(len(stages) - 1, 0)",
        "num_edges = len(stages), len(stages)",
    ),
]
