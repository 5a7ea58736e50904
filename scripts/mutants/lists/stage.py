"""Stages: the meshes of the DTensors that they receive, and contexts around forwards."""

CONTEXTS = "tests/runtime/test_forward_contexts.py"
TESTS = "tests/dist/test_dtensor_messages.py -k are_refused"
MUTANTS = [
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
