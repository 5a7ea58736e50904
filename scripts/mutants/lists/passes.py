"""Verification, memory along an order, and the two rewrites of backwards."""

VERIFY = "tests/passes/test_verification.py"
MEMORY = "tests/passes/test_held_memory.py"
GATHERS = "tests/passes/test_gathering.py"
SHARDING = "tests/passes/test_sharding_rules.py"
PROVED = "tests/passes/test_local_proof.py"
TESTS = "tests/passes/test_backward_halves.py"
MUTANTS = [
    # One rank's part.
    ("passes/local_proof.py", "stamp <= previous:", "stamp < previous:", PROVED),
    ("passes/local_proof.py", "before >= stamp", "before > stamp", PROVED),
    (
        "passes/local_proof.py",
        "if _has_backward(order) != _has_backward(orders[other]):",
        "if False:",
        PROVED,
    ),
    ("passes/local_proof.py", "        previous = stamp\n", "", PROVED),
    (
        "passes/verification.py",
        "        verify(schedule)  # It shows",
        "        # It shows",
        PROVED,
    ),
    # Verification: what an action may be.
    (
        "passes/verification.py",
        "if not 0 <= stage < schedule.num_stages:",
        "if not 0 <= stage <= schedule.num_stages:",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "if not 0 <= stage < schedule.num_stages:",
        "if stage >= schedule.num_stages:",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "if not 0 <= mb < schedule.num_microbatches:",
        "if not 0 <= mb <= schedule.num_microbatches:",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "if not 0 <= mb < schedule.num_microbatches:",
        "if mb >= schedule.num_microbatches:",
        VERIFY,
    ),
    ("passes/verification.py", "if holder != rank:", "if holder < rank:", VERIFY),
    (
        "passes/verification.py",
        "action.forward.mb == action.backward.mb:",
        "action.forward == action.backward:",
        VERIFY,
    ),
    ("passes/verification.py", "in parts(action):", "in parts(action)[:1]:", VERIFY),
    # What must come before it, and be there once.
    (
        "passes/verification.py",
        "return (seen.inputs, seen.weights), seen.forwards",
        "return (seen.inputs,), seen.forwards",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "return (seen.inputs, seen.weights), seen.forwards",
        "return (seen.inputs, seen.weights), None",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "return (seen.inputs,), seen.forwards",
        "return (seen.inputs,), None",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "return (seen.weights,), seen.inputs",
        "return (seen.weights,), seen.forwards",
        VERIFY,
    ),
    (
        "passes/verification.py",
        "key = stage * schedule.num_microbatches + mb",
        "key = stage * schedule.num_stages + mb",
        VERIFY,
    ),
    (
        "passes/verification.py",
        'else ("input backward", "I")',
        'else ("forward", "F")',
        VERIFY,
    ),
    # What is missing, and where that is said.
    (
        "passes/verification.py",
        "if not (seen.inputs or seen.weights or seen.recomputed):",
        "if not seen.weights:",
        VERIFY,
    ),
    ("passes/verification.py", ', (seen.weights, "W")]', "]", VERIFY),
    (
        "passes/verification.py",
        "stage, mb = divmod(missing, m)",
        "stage, mb = divmod(missing, schedule.num_stages)",
        VERIFY,
    ),
    ("passes/verification.py", "rank = schedule.placement.ranks[stage]", "rank = stage", VERIFY),
    (
        "passes/verification.py",
        "len(schedule.orders[rank]),",
        "len(schedule.orders[rank]) - 1,",
        VERIFY,
    ),
    # Rules that are left out.
    (
        "passes/verification.py",
        "if schedule.has_comms:",
        "if not schedule.has_comms:",
        "tests/passes/test_verification_fuzz.py",
    ),
    ("passes/verification.py", "for _ in walk(schedule):", "for _ in ():", VERIFY),
    ("passes/verification.py", "        check_stages(schedule, costs)", "        pass", MEMORY),
    ("passes/verification.py", "if held.during > cap", "if held.after > cap", MEMORY),
    ("passes/verification.py", "> caps[rank] * ROUNDING:", "> caps[rank]:", MEMORY),
    # Memory.
    ("passes/held_memory.py", "1 / num_held[rank] for", "1.0 for", MEMORY),
    (
        "passes/held_memory.py",
        "if num_stages != schedule.num_stages:",
        "if num_stages < schedule.num_stages:",
        MEMORY,
    ),
    ("passes/held_memory.py", "if len(caps) != num_ranks:", "if len(caps) < num_ranks:", MEMORY),
    (
        "passes/held_memory.py",
        "isinstance(cap, Real) and not isnan(cap)",
        "isinstance(cap, Real)",
        MEMORY,
    ),
    (
        "passes/held_memory.py",
        "Change(footprint.during_input[stage], left - kept)",
        "Change(footprint.during_input[stage], -kept)",
        MEMORY,
    ),
    (
        "passes/held_memory.py",
        "Change(footprint.during_weight[stage], -left)",
        "Change(footprint.during_weight[stage], 0.0)",
        MEMORY,
    ),
    (
        "passes/held_memory.py",
        "rise = max(rise, allocated + change.rise)",
        "rise = max(rise, change.rise)",
        MEMORY,
    ),
    (
        "passes/held_memory.py",
        "during = held + change.rise",
        "during = held + change.net",
        MEMORY,
    ),
    (
        "passes/held_memory.py",
        "return change if keeps else Change(change.rise, 0.0)",
        "return change",
        MEMORY,
    ),
    # Gathers, frees and reductions.
    (
        "passes/gathering.py",
        "victim = max(gathered,",
        "victim = min(gathered,",
        GATHERS,
    ),
    (
        "passes/gathering.py",
        "if uses.following(victim, now) <= place:",
        "if uses.following(victim, now) <= now:",
        GATHERS,
    ),
    ("passes/gathering.py", "return now + policy.ahead", "return now", GATHERS),
    ("passes/gathering.py", "following[: policy.stages_ahead]", "following[:1]", GATHERS),
    ("passes/gathering.py", "last if policy.frees_between else inf", "inf", GATHERS),
    ("passes/sharding_rules.py", "elif position < last[action.stage]:", "elif False:", SHARDING),
    (
        "passes/sharding_rules.py",
        "        freed.remove(action.stage)\n        gathered.add(action.stage)",
        "        freed.remove(action.stage)",
        SHARDING,
    ),
    # Rewrites.
    ("passes/backward_halves.py", "if not isinstance(action, Send):", "if True:"),
    (
        "passes/backward_halves.py",
        "yield action\n    yield from held_back",
        "yield action",
    ),
    (
        "passes/backward_halves.py",
        "yield from held_back\n            held_back = []",
        "yield from held_back",
    ),
    (
        "passes/backward_halves.py",
        "yield Overlap(forward, BackwardInput(stage, mb))\n"
        "                held_back = [BackwardWeight(stage, mb)]",
        "yield Overlap(forward, BackwardInput(stage, mb))",
    ),
    (
        "passes/backward_halves.py",
        "if after == BackwardWeight(\n            stage, mb\n        ):",
        "if after.stage == (\n            stage\n        ):",
    ),
    (
        "passes/backward_halves.py",
        "), BackwardWeight() if after == BackwardWeight(stage, mb):",
        "), BackwardWeight() if after.stage == stage:",
    ),
    ("passes/backward_halves.py", "skip = fused is not None", "skip = False"),
    (
        "passes/backward_halves.py",
        "return Overlap(forward, Backward(stage, mb))",
        "return Backward(stage, mb)",
    ),
    (
        "passes/sends_and_skips.py",
        "if flow.is_sent(message) and message not in present:",
        "if flow.is_sent(message):",
        "tests/passes/test_sends_and_skips.py tests/runtime/test_program.py",
    ),
    (
        "passes/sends_and_skips.py",
        "        if not isinstance(action, Recv):\n            yield action\n",
        "        yield action\n",
        "tests/passes/test_sends_and_skips.py tests/runtime/test_program.py",
    ),
    (
        "passes/sends_and_skips.py",
        "if not 0 <= source < target - 1 < num_stages - 1:",
        "if False:",
        "tests/passes/test_sends_and_skips.py",
    ),
    (
        "passes/simpler_orders.py",
        "if isinstance(part, Forward):",
        "if True:",
        "tests/passes/test_simpler_orders.py",
    ),
    (
        "passes/backward_halves.py",
        "case BackwardWeight(stage=stage) if stages is None or stage in stages:",
        "case BackwardWeight():",
        "tests/passes/test_simpler_orders.py",
    ),
    (
        "passes/message_rules.py",
        "if action.message not in due:",
        "if False:",
        "tests/passes/test_message_rules.py",
    ),
    (
        "passes/message_rules.py",
        "if posted.pop(message, None) is None:",
        "if False:",
        "tests/passes/test_message_rules.py",
    ),
    (
        "passes/message_rules.py",
        "if expected != message:",
        "if False:",
        "tests/passes/test_message_rules.py",
    ),
    # Gathers of stages that are sharded.
    (  # The first stage is freed although its weight backwards need it.
        "passes/gathering.py",
        "needed = {part.stage for part in compute_parts(action) if part.stage == 0}",
        "needed = set()",
        GATHERS,
    ),
    (
        "passes/gathering.py",
        "if is_due and not isinstance(action, Send):",
        "if is_due:",
        GATHERS,
    ),
    ("passes/gathering.py", "reduced.get(now - 1, ())", "reduced.get(now, ())", GATHERS),
    (
        "passes/gathering.py",
        "last[part.stage] = place",
        "last.setdefault(part.stage, place)",
        GATHERS,
    ),
]
