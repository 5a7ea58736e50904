"""Stages: the meshes of DTensors that they receive, contexts, and forwards that are repeated."""

CONTEXTS = "tests/runtime/test_forward_contexts.py"
TESTS = "tests/dist/test_dtensor_messages.py -k are_refused"
AGAIN = "tests/runtime/test_recomputing.py"
PARTS = "tests/runtime/test_recomputing_parts.py"
MUTANTS = [
    ("stage/random_states.py", "        self._put_back()\n        try", "        try", AGAIN),
    ("stage/random_states.py", "            now._put_back()", "            pass", AGAIN),
    (
        "stage/random_states.py",
        "generators = [torch.default_generator, *own]",
        "generators = [torch.default_generator]",
        AGAIN,
    ),
    (
        "stage/repeating.py",
        "elif value.is_changed or value.has_new_values:",
        "elif value.is_changed:",
        AGAIN,
    ),
    (
        "stage/repeating.py",
        "is_copied = forwards.changing is None or (module, name) in forwards.changing",
        "is_copied = forwards.changing is None",
        AGAIN,
    ),
    (
        "stage/repeating.py",
        "                self._buffers[value.module][value.name] = value.copy\n",
        "                pass\n",
        AGAIN,
    ),
    ("stage/repeating.py", "        own.update(now)\n", "        own.update(values)\n", AGAIN),
    ("stage/repeating.py", "        _assign(now)\n", "        pass\n", AGAIN),
    ("stage/repeating.py", "    _assign(values)\n", "    pass\n", AGAIN),
    (
        "stage/repeating.py",
        "leaves = [copies.get(id(leaf), leaf) for leaf in self._leaves]",
        "leaves = self._leaves",
        AGAIN,
    ),
    (
        "stage/repeating.py",
        "            if version_if_any(param) != version:",
        "            if False:",
        AGAIN,
    ),
    (
        "stage/recomputed_parts.py",
        "        if top_saved_tensors_hooks(False) != self._hooks:",
        "        if False:",
        PARTS,
    ),
    (
        "stage/recomputed_parts.py",
        "if self._is_inside or not torch.is_grad_enabled():",
        "if not torch.is_grad_enabled():",
        PARTS,
    ),
    ("stage/recomputed_parts.py", ", self._autocast.again():", ":", PARTS),
    ("stage/recomputed_parts.py", "own.clone() if is_changed else own", "own", PARTS),
    (
        "stage/recomputed_parts.py",
        "        if version_if_any(self._tensor) != self._num_changes:",
        "        if False:",
        PARTS,
    ),
    ("stage/recomputed_parts.py", " or not blank.fits(tensor):", ":", PARTS),
    ("stage/recomputed_parts.py", "        repeated.settle()\n", "", PARTS),
    ("stage/recomputed_parts.py", "        if missing:\n", "        if False:\n", PARTS),
    ("stage/part_names.py", "if known[name] not in found.values():", "if True:", PARTS),
    (
        "stage/pipeline_stage.py",
        ", passage.rerunning():",
        ":",
        PARTS,
    ),
    (
        "stage/meshes.py",
        "if (own := coordinate_on(mesh)) != spread.coordinate:",
        "if (own := coordinate_on(mesh)) is None:",
    ),
    (
        "stage/meshes.py",
        "if not isinstance(mesh, DeviceMesh) or not fits(mesh, spread):",
        "if not isinstance(mesh, DeviceMesh):",
    ),
    ("stage/meshes.py", "            mesh = mesh[wanted]\n", "            pass\n"),
    (
        "stage/forward_contexts.py",
        " and not torch.is_grad_enabled() and",
        " and False and",
        CONTEXTS,
    ),
    (
        "stage/pipeline_stage.py",
        "any(map(needs_grad, chain(_inputs_of(args, kwargs), self._submod.parameters())))",
        "any(map(needs_grad, self._submod.parameters()))",
        CONTEXTS,
    ),
]
