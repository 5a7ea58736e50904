"""Compiled regions: the cut of their backward, their calls, and stages around them."""

TESTS = "tests/compiling tests/runtime/test_compiled_stages.py"
CUT = "tests/compiling/test_graph_cut.py"
STAGES = "tests/runtime/test_compiled_stages.py"
CALLS = "tests/compiling/test_region_calls.py"
MUTANTS = [
    (
        "compiling/graph_cut.py",
        "if not must or any(map(_overwrites, graph.nodes)):",
        "if not must:",
        CUT,
    ),
    ("compiling/graph_cut.py", 'getattr(node.target, "is_view", False)', "False", CUT),
    (
        "compiling/graph_cut.py",
        'new.placeholder(f"unchanged_{node.name}")',
        "new.placeholder(node.name)",
        CUT,
    ),
    ("compiling/compiled_backward.py", "in self._region.values", "in self._region.parameters", CUT),
    ("compiling/compiled_backward.py", "if not call.calls.may_wait(params):", "if False:", CALLS),
    (
        "compiling/graph_cut.py",
        "if wait and bases[number] is not None and bases.count(bases[number]) == 1",
        "if wait and bases[number] is not None",
        CUT,
    ),
    (
        "compiling/graph_cut.py",
        "    must += _uses_of(parameters, graph, late)\n",
        "",
        CUT,
    ),
    (
        "compiling/graph_cut.py",
        "if number in products or _needed(",
        "if number in products or not _needed(",
        CUT,
    ),
    (
        "compiling/graph_cut.py",
        "    must += [node for node in graph.nodes if _has_effects(node)]\n",
        "",
        CUT,
    ),
    ("compiling/graph_cut.py", "return str(node.target) in _VIEWS or (", "return (", CUT),
    (
        "compiling/graph_cut.py",
        "        node.args = (*args, [True, False, False])\n",
        "",
        CUT,
    ),
    (
        "compiling/compiled_backward.py",
        "is_split = call is not None and call.calls.is_splitting",
        "is_split = call is not None",
    ),
    (
        "compiling/compiled_backward.py",
        "number is not None and _has_shape(out, self._region.parameters.get(number))",
        "number is not None",
    ),
    ("backward/wrappers.py", "or sequence_number(node) < made_since:", "or False:"),
    (
        "compiling/regions.py",
        "own = {number: args[number] for number in self.parameters}",
        "own = {number: args[min(self.parameters)] for number in self.parameters}",
    ),
    (
        "compiling/module_compiler.py",
        'found["triton.cudagraphs"] = False',
        "pass",
        "tests/compiling/test_compile_options.py",
    ),
    (
        "backward/compiled_calls.py",
        "key=lambda call: call.sequence_number, reverse=True",
        "key=lambda call: call.sequence_number",
    ),
    (
        "backward/compiled_calls.py",
        "        finally:\n            self.is_splitting = False\n",
        "        finally:\n            pass\n",
    ),
    ("backward/engine.py", "note_calls_in(calls)", "note_calls_in(CompiledCalls())", CUT),
    ("backward/compiled_calls.py", "        self.unmodified.check()\n", ""),
    (  # A weight of two calls is added twice, and rounded differently.
        "backward/engine.py",
        "are_apart = not groups and _are_apart(waiting, taps, arrived)",
        "are_apart = True",
    ),
    (
        "backward/engine.py",
        "len(set(own)) == len(own) and others.isdisjoint(own)",
        "len(set(own)) == len(own)",
    ),
    (
        "runtime/compiled_stages.py",
        "compile_in_place(unwrapped(stage.submod), backend=backend)",
        "unwrapped(stage.submod).compile(backend=backend)",
        STAGES,
    ),
]
