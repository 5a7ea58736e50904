"""The simulator, and what follows from timelines, simulated or recorded."""

REPORT = "tests/timeline/test_bubble_report.py"
RECORDING = "tests/timeline/test_recording.py"
GATHERS = "tests/sim/test_collectives.py"
TESTS = "tests/sim/test_engine.py"
MUTANTS = [
    # The simulator.
    (
        "sim/simulator.py",
        "costs.overlap_saving * min(halves)",
        "costs.overlap_saving * max(halves)",
    ),
    (
        "sim/simulator.py",
        "any(costs.transfer) or len(set(costs.delay)) > 1",
        "any(costs.transfer)",
    ),
    (
        "sim/simulator.py",
        "max(time, self._free_at.get(channel, 0.0)) + transfer",
        "time + transfer",
    ),
    (
        "sim/simulator.py",
        "max(free_at + delay, self._last_arrival.get(channel, 0.0))",
        "free_at + delay",
    ),
    (
        "sim/simulator.py",
        "self._delays[message.edge], self._transfers[message.edge]",
        "self._delays[message.maker - 1], self._transfers[message.edge]",
    ),
    (
        "sim/simulator.py",
        "time = costs.backward[action.stage]",
        "time = costs.backward_input[action.stage] + costs.backward_weight[action.stage]",
    ),
    (
        "sim/simulator.py",
        "transfer *= self._scales[message.mb]",
        "transfer *= 1",
        "tests/sim/test_engine_fuzz.py",
    ),
    (
        "passes/held_memory.py",
        "change = change.times(scales[part.mb])",
        "pass",
        "tests/costs/test_microbatch_scales.py",
    ),
    ("sim/simulator.py", "    check_orders(schedule)  #", "    #"),
    (
        "sim/simulator.py",
        "share = whole_shares(schedule).after_forward",
        "share = [1.0] * schedule.num_stages",
    ),
    # Reports.
    (
        "timeline/bubble_report.py",
        "return self.last_end - self.first_start",
        "return self.last_end",
        REPORT,
    ),
    (
        "timeline/bubble_report.py",
        "cuts = [0, first_backward, max(first_backward, last_forward + 1), len(order)]",
        "cuts = [0, first_backward, max(first_backward, last_forward), len(order)]",
        REPORT,
    ),
    (
        "timeline/bubble_report.py",
        "max(warm_up_end, ends[last_forward]), makespan]",
        "ends[last_forward], makespan]",
        REPORT,
    ),
    (
        "timeline/bubble_report.py",
        "first_start=starts[0] - ",
        "first_start=timeline.starts[rank][0] - ",
        "tests/sim tests/timeline",
    ),
    (
        "timeline/bubble_report.py",
        "return 0.0 if abs(idle) <= 1e-12 * total else idle",
        "return idle",
        REPORT,
    ),
    (
        "timeline/memory_over_time.py",
        "if amount != points[-1].held:",
        "if True:",
        REPORT,
    ),
    (
        "timeline/memory_over_time.py",
        "yield end, level.after",
        "yield start, level.after",
        REPORT,
    ),
    # Gathers, frees and reductions.
    (
        "sim/simulator.py",
        "start = max(issued, self._free_at[rank])",
        "start = issued",
        GATHERS,
    ),
    (
        "sim/simulator.py",
        "max(issued, self._gathered_at[stage])",
        "issued",
        GATHERS,
    ),
    (
        "sim/simulator.py",
        "            if blocking:\n                free[rank] = end\n            continue",
        "            continue",
        GATHERS,
    ),
    (
        "timeline/bubble_report.py",
        "makespan = max(map(max, timeline.ends))",
        "makespan = max(ends[-1] for ends in timeline.ends)",
        GATHERS,
    ),
    (
        "timeline/bubble_report.py",
        "starts[0] - _first_gathers(timeline, rank)",
        "starts[0]",
        GATHERS,
    ),
    (
        "timeline/memory_over_time.py",
        "in sorted(changes, key=itemgetter(0)):",
        "in changes:",
        GATHERS,
    ),
    # Recordings.
    ("timeline/recording.py", "timelines[(len(timelines) - 1) // 2]", "timelines[-1]", RECORDING),
    ("timeline/recording.py", "in reversed(self.steps))", "in self.steps)", RECORDING),
    ("timeline/recording.py", "zip([0.0, *times], ", "zip([times[0], *times], ", RECORDING),
    ("timeline/costs_of_recording.py", "if made[message] >= was_free:", "if True:", RECORDING),
    (
        "timeline/costs_of_recording.py",
        "(Backward, stage), 0.0) / 2",
        "(Backward, stage), 0.0)",
        RECORDING,
    ),
    (
        "timeline/costs_of_recording.py",
        "statistics.median(values) for",
        "statistics.fmean(values) for",
        RECORDING,
    ),
    (
        "timeline/costs_of_recording.py",
        "found[message.edge, message.is_gradient]",
        "found[message.edge, False]",
        RECORDING,
    ),
]
