"""Algorithms, on the shapes and times where a fault shows; most drawings are of one shape only."""

GRID = "tests/schedules/test_registry_grid.py"
NAMES = "tests/schedules/test_registry.py"
PROVED = "tests/passes/test_local_proof.py"
SQUEEZED = "tests/schedules/test_squeezing.py"
TESTS = "tests/schedules/test_formulas.py"
MUTANTS = [
    # Orders.
    ("schedules/zb_v.py", "if m >= 2 * p - 1:", "if m >= 2 * p - 2:", GRID),
    (
        "schedules/interleaved_1f1b.py",
        "count = max(1, shape.m // shape.p)",
        "count = -(-shape.m // shape.p)",
        GRID,
    ),
    (
        "schedules/interleaved_1f1b.py",
        "upto = min(m, group.stop + lead)",
        "upto = group.stop + lead",
        GRID,
    ),
    ("schedules/v_half.py", "shift = 3 if p % 2 == 0 else 0", "shift = 3", GRID),
    ("schedules/v_min.py", "shift = 2 if p % 3 == 0 else 0", "shift = 0", GRID),
    (
        "schedules/squeezing.py",
        "due[num_weights] <= place <= last_forward",
        "False",
        GRID,
    ),
    (
        "schedules/squeezing.py",
        "if start <= time:",
        "if start <= time + 1:",
        SQUEEZED,
    ),
    ("schedules/building_block.py", "            elif num_waiting:", "            else:", SQUEEZED),
    # Stamps.
    ("schedules/interleaved_1f1b.py", "max(len(group), p) for", "len(group) for", PROVED),
    ("schedules/interleaved_1f1b.py", "min(lead, m - round_of[mb].stop)", "lead", PROVED),
    ("schedules/dual_pipe_v.py", "by_place(per_rank=3,", "by_place(per_rank=2,", PROVED),
    ("schedules/zb_h2.py", "first=2 * rank", "first=0", PROVED),
    (
        "schedules/dual_pipe_v.py",
        "if turn == 0 and rank == p - 1:",
        "if turn == 0 and rank == p:",
        "tests/schedules/test_torch_interchange.py",
    ),
    (
        "schedules/dual_pipe_v.py",
        "min_microbatches=lambda shape: 2 * shape.p",
        "min_microbatches=lambda shape: 2 * shape.p - 1",
        NAMES,
    ),
    (
        "schedules/alternation.py",
        "if len(waiting) > delay:",
        "if len(waiting) >= delay:",
        "tests/schedules/test_golden.py",
    ),
    ("schedules/alternation.py", "    yield from waiting\n", "", GRID),
    (
        "schedules/zb_h1.py",
        "delay_weights(alternating_order(shape, rank), delay=rank)",
        "delay_weights(alternating_order(shape, rank), delay=0)",
    ),
    # Memory.
    ("schedules/zb_h2.py", "min(shape.m, 2 * shape.p - 1)", "min(shape.m, 2 * shape.p)", GRID),
    (
        "schedules/one_f_one_b.py",
        "peak=lambda shape: min(shape.m, shape.p)",
        "peak=lambda shape: shape.p",
        GRID,
    ),
    ("schedules/v_half.py", "(shape.p + 2) // 2", "(shape.p + 3) // 2", GRID),
    # Bubbles.
    ("schedules/v_half.py", "(16, 17, 14, 19)", "(16, 17, 14, 15)", GRID),
    ("schedules/v_min.py", "(3 if shape.p % 3 == 0 else 5)", "5", GRID),
    ("schedules/gpipe.py", "t.total + 2 * t.c", "t.total + t.c"),
    ("schedules/one_f_one_b.py", "2 * (p - 2)) * times.c", "2 * (p - 1)) * times.c"),
    (
        "schedules/forward_only.py",
        "(p - 1) * hop + (v - 1) * max(0.0, p * hop - m * times.f / v) * (p > 1)",
        "(p - 1) * hop",
        GRID,
    ),
    ("schedules/dual_pipe_v.py", "- 3 * times.w", "- 2 * times.w"),
    # Where bubbles hold.
    ("schedules/zb_h1.py", "(shape.m == shape.p and times.c == 0)", "shape.m == shape.p"),
    (
        "schedules/zb_h2.py",
        "2 * times.c <= times.w <= min(times.f, times.i)",
        "times.w <= min(times.f, times.i)",
    ),
    ("schedules/zb_v.py", "times.f == times.i >= times.w", "times.f == times.i"),
    (
        "schedules/interleaved_zero_bubble.py",
        "t.w <= min(t.f, t.i)",
        "t.w <= t.f",
    ),
    (
        "schedules/interleaved_1f1b.py",
        "(is_hidden and m % p == 0 and p > 1)",
        "(is_hidden and p > 1)",
    ),
    (
        "schedules/interleaved_ahead.py",
        "is_hidden = p * times.c <= times.f / v and",
        "is_hidden =",
    ),
    ("schedules/looped_bfs.py", "t.c == 0 and shape.m >= shape.p", "t.c == 0"),
    # Names and numbers.
    ("schedules/registry.py", 'not in "-_ "', 'not in "-_"', NAMES),
    ("schedules/generator.py", "if shape.m < fewest:", "if shape.m <= fewest:", NAMES),
]
