"""Stages that run the whole model's forward, with hollow tensors for what others compute."""

LAYERS = "tests/cutting/test_cut_between_layers.py"
STAGES = "tests/cutting/test_rerun_stages.py"
TESTS = LAYERS + " " + STAGES
MUTANTS = [
    # What a stage runs, receives and gives.
    (
        "cutting/rerun_stage.py",
        "return value.clone() if is_written else value",
        "return value",
    ),
    ("cutting/rerun_stage.py", "        if state.number != self.end:", "        if False:"),
    (
        "cutting/rerun_stage.py",
        "if number >= self.end or self.calls[number].name != name:",
        "if number >= self.end:",
    ),
    (
        "cutting/rerun_stage.py",
        "                self._check_dtype(number, k, leaf, value)\n",
        "",
    ),
    (
        "cutting/rerun_stage.py",
        "                container.extend(changed[len(container) :])\n",
        "                container.extend(changed)\n",
    ),
    (
        "cutting/rerun_stage.py",
        "if not isinstance(value, Tensor) or isinstance(value, Hollow):",
        "if not isinstance(value, Tensor):",
    ),
    # Random numbers.
    (
        "cutting/rerun_stage.py",
        "self.own.start > 0 and state.number <= self.own.start",
        "state.number < self.own.start",
    ),
    (
        "cutting/foreign_draws.py",
        "rate > 0 and (self._is_trial or bool(is_training))",
        "rate > 0 and bool(is_training)",
    ),
    ("cutting/foreign_draws.py", " or result.numel() < 2:", ":"),
    # Hollow tensors.
    (
        "cutting/hollow.py",
        "        if _writes(name, args, given) and not isinstance(args[0], Hollow):",
        "        if False:",
    ),
    ("cutting/hollow.py", '    "new_zeros": torch.zeros,\n', ""),
    ("cutting/hollow.py", '    "ones_like": torch.ones,\n', '    "ones_like": torch.zeros,\n'),
    # What stages hold, and their inputs.
    (
        "cutting/rerun_cut.py",
        "if is_buffer and uses.is_written and len(stages) > 1:",
        "if False:",
    ),
    (
        "cutting/rerun_cut.py",
        "nn.Parameter(tensor.detach().clone(), tensor.requires_grad)",
        "nn.Parameter(tensor.detach().clone())",
    ),
    (
        "cutting/rerun_cut.py",
        "            set_hooks_of_calls(self, own[_HOOKS])\n",
        "",
    ),
    (
        "cutting/repeated_inputs.py",
        "        for name in self._written:\n",
        "        for name in ():\n",
    ),
    ("cutting/repeated_inputs.py", " or form != leaf:", ":"),
    (
        "cutting/unit_calls.py",
        "        if self.is_inside or self.functions:",
        "        if self.is_inside:",
    ),
]
