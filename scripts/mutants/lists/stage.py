"""Stages: the meshes of the DTensors that they receive."""

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
]
