"""Microbatches and stages: how a batch is cut, joined and weighed, and what a stage hands on."""

TESTS = "tests/microbatches"
CUTTING = "tests/microbatches/test_splitting_and_merging.py"
STRUCTURED = "tests/microbatches/test_structured_arguments.py"
WEIGHTS = "tests/microbatches/test_loss_weights.py"
STAGE_ERRORS = "tests/runtime/test_stage_errors.py"
SKIP_ERRORS = "tests/runtime/test_skip_errors.py"
ODD_MODELS = "tests/runtime/test_odd_models.py"

CUTTING_MUTANTS = [
    (
        "microbatches/splitting.py",
        "is_count = isinstance(count, int) and count > 0",
        "is_count = isinstance(count, int) and count >= 0",
        CUTTING,
    ),
    (
        "microbatches/splitting.py",
        "if spec is not None and leaves:",
        "if spec is not None:",
        CUTTING,
    ),
    (
        "microbatches/splitting.py",
        "is_enough = leaf.size(dim) >= num_microbatches",
        "is_enough = leaf.size(dim) > num_microbatches",
        CUTTING,
    ),
    (
        "microbatches/splitting.py",
        "parts = leaf.tensor_split(num_microbatches, dim)",
        "parts = leaf.chunk(num_microbatches, dim)",
        CUTTING,
    ),
    (
        "microbatches/splitting.py",
        "elif num_microbatches > 1 and holds_batch(leaf, batches):",
        "elif holds_batch(leaf, batches):",
        STRUCTURED,
    ),
    (
        "microbatches/splitting.py",
        "if batch_of_mask(leaf) > 1 and num_microbatches > 1:",
        "if num_microbatches > 1:",
        STRUCTURED,
    ),
    (
        "microbatches/splitting.py",
        "if not parts or not {type(part) for part in parts} <= kinds:",
        "if not parts:",
        STRUCTURED,
    ),
    ("microbatches/splitting.py", "        if size != batch:", "        if False:", STRUCTURED),
    (
        "microbatches/chunk_specs.py",
        "has_dim = -value.dim() <= spec.split_dim < value.dim()",
        "has_dim = -value.dim() <= spec.split_dim <= value.dim()",
        CUTTING,
    ),
    (
        "microbatches/chunk_specs.py",
        "if parts is None or spec_parts is None or parts.keys() != spec_parts.keys():",
        "if parts is None or spec_parts is None or not parts.keys() <= spec_parts.keys():",
        CUTTING,
    ),
    ("microbatches/masks.py", "first_row += batch_of_mask(piece)", "first_row += 1", STRUCTURED),
    (
        "microbatches/masks.py",
        "        if value.shape[0] != batch:",
        "        if False:",
        STRUCTURED,
    ),
    (
        "microbatches/hidden_tensors.py",
        "        if not isinstance(value, nn.Parameter):\n            yield value\n",
        "        yield value\n",
        STRUCTURED,
    ),
    ("microbatches/hidden_tensors.py", "_MAX_DEPTH = 6", "_MAX_DEPTH = 3", STRUCTURED),
    (
        "microbatches/hidden_tensors.py",
        'slots = kind.__dict__.get("__slots__", ())',
        "slots = ()",
        STRUCTURED,
    ),
    (
        "microbatches/hidden_tensors.py",
        "if callable(value) or len(seen) >= _MAX_OBJECTS:",
        "if len(seen) >= _MAX_OBJECTS:",
        STRUCTURED,
    ),
]

MERGING_MUTANTS = [
    (
        "microbatches/merging.py",
        "torch.cat(values, dim) if values[0].dim()",
        "torch.cat(values) if values[0].dim()",
        CUTTING,
    ),
    (
        "microbatches/merging.py",
        "-1 if i in (dim, dim + value.dim()) else n",
        "-1 if i == dim else n",
        CUTTING,
    ),
    (
        "microbatches/merging.py",
        "if leaves is None or not all(map(is_leaf, leaves)):",
        "if leaves is None:",
        CUTTING,
    ),
    (
        "microbatches/merging.py",
        "is_cut = len(values) > 1 and isinstance(spec, TensorChunkSpec)",
        "is_cut = len(values) > 1",
        STRUCTURED,
    ),
    (
        "microbatches/merging.py",
        "has_tensor = any(isinstance(value, Tensor) for value in values)",
        "has_tensor = isinstance(values[0], Tensor)",
        CUTTING,
    ),
]

WEIGHT_MUTANTS = [
    (
        "microbatches/loss_weights.py",
        "weight * num_replicas * len(weights) / total",
        "weight * num_replicas / total",
        WEIGHTS,
    ),
    (
        "microbatches/loss_weights.py",
        "            if loss.dtype in _NARROW:",
        "            if False:",
        WEIGHTS,
    ),
    (
        "microbatches/loss_weights.py",
        "return loss * factor if factor else torch.zeros_like(loss)",
        "return loss * factor",
        WEIGHTS,
    ),
    (
        "microbatches/loss_weights.py",
        "is_number = isinstance(weight, Real) and not isinstance(weight, bool)",
        "is_number = isinstance(weight, Real)",
        WEIGHTS,
    ),
    (
        "microbatches/loss_weights.py",
        "not math.isfinite(weight) or weight < 0:",
        "not math.isfinite(weight) or weight <= 0:",
        WEIGHTS,
    ),
    (
        "microbatches/loss_weights.py",
        "if not is_number or not math.isfinite(weight) or weight < 0:",
        "if not is_number or weight < 0:",
        WEIGHTS,
    ),
    ("microbatches/loss_weights.py", "        if not are_cut:", "        if are_cut:", WEIGHTS),
    (
        "microbatches/loss_weights.py",
        "        and (len(column) == 1 or any(x is not column[0] for x in column))\n",
        "",
        WEIGHTS,
    ),
    ("microbatches/loss_weights.py", "        if not total > 0:", "        if total < 0:", WEIGHTS),
    (  # A rule would silently win over the weights of one step.
        "microbatches/loss_weights.py",
        "    if weights is not None:\n",
        "    if weights is not None and rule is None:\n",
        WEIGHTS,
    ),
]

STAGE_MUTANTS = [
    (
        "stage/passage.py",
        "self._forward.backward_input(loss=loss * grads)",
        "self._forward.backward_input(loss=loss)",
        WEIGHTS,
    ),
    (
        "stage/passage.py",
        "            if all(grad is None for grad in output_grads):\n"
        "                return (None,) * len(self.inputs), do_nothing\n",
        "",
        WEIGHTS,
    ),
    (
        "stage/passage.py",
        "[torch.zeros_like(leaf) if needs_grad(leaf) else None for leaf in outputs]",
        "[torch.ones_like(leaf) if needs_grad(leaf) else None for leaf in outputs]",
        WEIGHTS,
    ),
    (
        "stage/passage.py",
        "do_nothing if self._dw_builder is None else self._dw_builder()",
        "do_nothing",
        "tests/runtime/test_custom_parts.py",
    ),
    (
        "stage/outputs.py",
        "return tuple(outputs) if type(outputs) in (tuple, list) else (outputs,)",
        "return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)",
        ODD_MODELS,
    ),
    (
        "stage/outputs.py",
        "counts = [len(arguments) - sum(skips_out.values()), *skips_out.values()]",
        "counts = [len(arguments) - len(skips_out), *skips_out.values()]",
        "tests/runtime/test_skips.py",
    ),
    ("stage/examples.py", "    if tensor.dtype != expected.dtype:", "    if False:", STAGE_ERRORS),
    (
        "stage/examples.py",
        "    if len(found) != len(examples):",
        "    if len(found) < len(examples):",
        STAGE_ERRORS,
    ),
    (
        "stage/stage_checks.py",
        "0 <= stage_index < num_stages",
        "0 <= stage_index <= num_stages",
        STAGE_ERRORS,
    ),
    ("stage/stage_checks.py", "or count < 1:", "or count < 0:", SKIP_ERRORS),
    (
        "stage/stage_checks.py",
        "dict(sorted(skips.items()))",
        "dict(skips)",
        "tests/runtime/test_skips.py",
    ),
    (
        "stage/pipeline_stage.py",
        "            if self._engine is not None:\n                self._engine.refresh()\n",
        "",
        "tests/backward/test_engine_limits.py",
    ),
    (
        "stage/pipeline_stage.py",
        "        self._engine = None\n        self._is_compiled",
        "        self._is_compiled",
        "tests/runtime/test_changed_stages.py",
    ),
    (
        "stage/pipeline_stage.py",
        "        if len(arguments) < num_skipping:",
        "        if len(arguments) <= num_skipping:",
        "tests/runtime/test_skips.py",
    ),
    (
        "stage/unchanged.py",
        "            buffer.copy_(value)",
        "            pass",
        "tests/runtime/test_stage_costs.py",
    ),
]

MUTANTS = [*CUTTING_MUTANTS, *MERGING_MUTANTS, *WEIGHT_MUTANTS, *STAGE_MUTANTS]
