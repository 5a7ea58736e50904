"""Stages cut out of a model."""

MODELS = "tests/cutting/test_cut_models.py"
ERRORS = "tests/cutting/test_cut_errors.py"
LIMITS = "tests/cutting/test_cut_limits.py"
ODD = "tests/cutting/test_odd_cuts.py"
DETAILS = "tests/cutting/test_cut_details.py"
CHAIN = "tests/cutting/test_split_modules.py"
COSTS = "tests/cutting/test_layer_costs.py"
LOSS = "tests/cutting/test_loss_costs.py"
TESTS = MODELS
MUTANTS = [
    # What flows between stages.
    (
        "cutting/flow.py",
        "pairwise(sorted(users | {stage_of[node]}))",
        "((stage_of[node], user) for user in sorted(users - {stage_of[node]}))",
        DETAILS,
    ),
    ("cutting/flow.py", "        if len(seen) > 1:", "        if False:", ERRORS + " " + LIMITS),
    ("cutting/flow.py", "        if len(users) > 1:", "        if False:", ERRORS + " " + LIMITS),
    (
        "cutting/flow.py",
        "impure = {torch.Tag.nondeterministic_seeded, ",
        "impure = {",
        DETAILS,
    ),
    (
        "cutting/flow.py",
        "        sources = range(stage)\n",
        "        sources = reversed(range(stage))\n",
    ),
    (
        "cutting/aliases.py",
        "        if number in hidden and node.args[condition]:",
        "        if False:",
        LIMITS + " " + ERRORS + " " + ODD,
    ),
    (
        "cutting/aliases.py",
        "if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:",
        "if False:",
        LIMITS + " " + ODD + " " + DETAILS,
    ),
    # Stages as modules.
    ("cutting/assembling.py", "        if node in flow.written[stage]:", "        if False:", ODD),
    (
        "cutting/assembling.py",
        "is_first=stage == holders[value][0]",
        "is_first=True",
        DETAILS + " " + MODELS,
    ),
    (
        "cutting/assembling.py",
        "    if trace.model.training:\n        follow_training_mode(graph)\n",
        "",
        "tests/cutting/test_training_mode.py",
    ),
    (
        "cutting/training_mode.py",
        "    _aten.alpha_dropout.default: 2,\n",
        "",
        "tests/cutting/test_training_mode.py",
    ),
    (
        "cutting/training_mode.py",
        "        return 1  # One more, or none.",
        "        return None",
        "tests/cutting/test_training_mode.py",
    ),
    (
        "cutting/model_names.py",
        "name not in non_persistent_buffers(module)",
        "True",
        DETAILS + " " + MODELS,
    ),
    (
        "cutting/model_names.py",
        "nn.Parameter(tensor.detach().clone(), tensor.requires_grad)",
        "nn.Parameter(tensor.detach().clone())",
        DETAILS,
    ),
    (
        "cutting/restored.py",
        'if getattr(module, "padding_mode", "zeros") != "zeros":',
        "if False:",
        DETAILS,
    ),
    (
        "cutting/restored.py",
        '    if "forward" in vars(module):',
        "    if False:",
        DETAILS,
    ),
    (
        "cutting/cut_model.py",
        "if source == stage and target > stage + 1",
        "if source == stage and target > stage",
    ),
    (
        "cutting/cut_model.py",
        "        _join_names(stage_index, module, self._names[stage_index])\n",
        "",
        DETAILS + " " + LIMITS + " tests/cutting/test_cut_memory.py",
    ),
    (
        "cutting/cut_model.py",
        "return device if isinstance(value, torch.device) else value",
        "return value",
        DETAILS + " " + LIMITS + " " + ODD,
    ),
    # Between modules.
    (
        "cutting/chain.py",
        "{t for t, holders in tied.items() if stage in holders[1:]}",
        "set()",
        CHAIN,
    ),
    (
        "cutting/chain.py",
        "        if not is_trial:\n            self._check_buffers(ranges)\n",
        "",
        LIMITS + " " + DETAILS,
    ),
    ("cutting/chain.py", "        if self._begins_in_place:", "        if False:", LIMITS),
    (
        "cutting/chain.py",
        "for key, value in kwargs.items() if key in keywords",
        "for key, value in kwargs.items()",
        CHAIN,
    ),
    (
        "cutting/chain.py",
        "return is_plain and not any(hooks_of_calls(module))",
        "return is_plain",
        DETAILS,
    ),
    # Keyword arguments that nobody takes.
    (
        "cutting/chain.py",
        "        if kwargs:\n            self._check_keywords(kwargs)\n",
        "",
        ERRORS,
    ),
    (
        "cutting/tracing.py",
        "        if given:\n            inputs.check_keywords(stage, given)\n",
        "",
        ERRORS,
    ),
    ("cutting/inputs.py", "*self._parameters[: self._num_args]}", "}", ERRORS),
    # Marks and traces.
    (
        "cutting/marks.py",
        "        if name not in called:",
        "        if False:",
        ERRORS,
    ),
    (
        "cutting/inputs.py",
        "or isinstance(leaf, Tensor) or not _is_same(expected, leaf):",
        "or isinstance(leaf, Tensor):",
        ERRORS + " " + LIMITS,
    ),
    (
        "cutting/own_backwards.py",
        "            if cls is CheckpointFunction:",
        "            if False:",
        LIMITS + " " + ERRORS,
    ),
    # What layers cost, and cuts by that.
    ("cutting/layer_costs.py", "for parameter in used - seen", "for parameter in used", COSTS),
    (
        "cutting/shape_counts.py",
        "        if storage not in self._seen:",
        "        if True:",
        COSTS,
    ),
    (
        "cutting/loss_costs.py",
        "outputs.shape[:1] + outputs.shape[2:]",
        "outputs.shape[:-1]",
        LOSS,
    ),
    ("cutting/loss_costs.py", "torch.autograd.backward(roots, ones, inputs=wanted)", "...", LOSS),
    (
        "cutting/cut_policies.py",
        "self.bytes_per_parameter_byte + cost.backward_bytes",
        "self.bytes_per_parameter_byte",
        LOSS,
    ),
    (
        "cutting/cut_policies.py",
        "[self.num_stages - stage for stage in range(self.num_stages)]",
        "[1 for stage in range(self.num_stages)]",
        COSTS,
    ),
    (
        "cutting/graph_layers.py",
        "    layers = _join(_group(operations, _outermost_entry), bound)",
        "    layers = _group(operations, _outermost_entry)",
        COSTS + " " + LIMITS + " " + DETAILS,
    ),
]
