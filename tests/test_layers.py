"""The folders are the architecture: each room says which others it may use."""

from collections import Counter

import pytest

from imports import SOURCE_FILES, SRC, imported_names, imported_names_of_file, is_inside, name_file

# What each room may use besides itself and `errors`. `torch` marks the rooms that need torch: the
# others load in a fraction of a second, and plan, verify, simulate and draw without it.
MAY_USE = {
    "errors": "",
    "extras": "",
    "sealed": "",
    "user_code": "",
    "ir": "",
    "costs": "ir",
    "schedules": "ir",
    "passes": "ir costs",
    "timeline": "ir costs passes",
    "sim": "ir costs passes timeline",
    "solver": "extras ir costs schedules passes timeline sim",
    "partition": "ir",
    "draw": "extras ir costs timeline",
    "studio": "extras ir costs schedules timeline sim solver draw",
    "torch_version": "torch",
    "torch_private": "torch torch_version",
    "backward": "torch torch_private sealed",
    "compiling": "torch torch_private backward",
    "watch": "",
    "comm": "torch torch_private ir backward watch",
    "microbatches": "torch torch_private comm",
    "stage": "torch torch_private ir sealed backward comm",
    "cutting": "torch torch_private ir partition stage",
    "runtime": "torch torch_private ir costs schedules passes timeline sim solver sealed"
    " backward compiling watch comm microbatches stage",
    "snapshots": "torch torch_private comm",
    "replacing": "",
    "compat": "torch torch_private replacing ir schedules passes sealed backward comm microbatches"
    " stage cutting runtime",
    "planning": "torch torch_private ir costs passes solver partition microbatches cutting",
    "parallel": "torch torch_private extras ir schedules timeline sealed comm microbatches stage"
    " cutting runtime snapshots",
    "dry": "torch torch_private ir costs passes comm stage cutting runtime parallel",
    "training": "torch extras user_code ir costs schedules timeline sim comm stage cutting runtime"
    " snapshots parallel dry",
    "cli": "torch torch_private extras user_code ir costs schedules passes timeline sim solver draw"
    " studio planning dry training replacing",
    "__main__": "cli",
}

# Methods that users expect where they hold a value. Each breaks the table above and imports when
# it is called, so each is listed by name.
FRONT_DOORS = {
    ("penstock/ir/schedule.py", "penstock.passes.verification.verify"),  # schedule.verify()
    ("penstock/ir/schedule.py", "penstock.costs.footprint.Footprint"),  # Its argument's type.
    ("penstock/timeline/recording.py", "penstock.sim.simulator.simulate"),  # simulated()
}

ROOMS_AND_FILES = [
    (path.relative_to(SRC / "penstock").parts[0].removesuffix(".py"), path)
    for path in SOURCE_FILES
    if path != SRC / "penstock" / "__init__.py"
]


def find_faults(room: str, names: list[str]) -> list[str]:
    """Return what is wrong with a module of `room` that imports `names`."""
    if room not in MAY_USE:
        return [f"{room} is not a room yet: add what it may use to MAY_USE of tests/test_layers.py"]
    allowed = {room, "errors", *MAY_USE[room].split()}
    faults = []
    for name in names:
        if is_inside(name, "penstock"):
            used = name.split(".")[1] if "." in name else ""
            if used not in MAY_USE:
                faults.append(f"{room} imports {name}: import it from the room that defines it")
                continue
        elif is_inside(name, "torch"):
            used = "torch"
        else:
            continue
        if used not in allowed:
            faults.append(f"{room} imports {name}, but may not use {used}")
    return faults


def test_each_room_uses_only_the_rooms_it_may_use() -> None:
    faults = []
    for room, path in ROOMS_AND_FILES:
        file = name_file(path)
        names = [name for name in imported_names_of_file(path) if (file, name) not in FRONT_DOORS]
        faults += [f"{file}: {fault}" for fault in find_faults(room, names)]
    assert [] == faults


def test_each_room_uses_what_it_may_use() -> None:
    """Otherwise the table would allow more than the design says."""
    used = {room: {room} for room in MAY_USE}
    for room, path in ROOMS_AND_FILES:
        for name in imported_names_of_file(path):
            if is_inside(name, "torch"):
                used[room].add("torch")
            elif is_inside(name, "penstock"):
                used[room].add(name.split(".")[1])
    unused = {room: set(may.split()) - used[room] for room, may in MAY_USE.items()}
    assert {} == {room: rooms for room, rooms in unused.items() if rooms}


def test_rooms_use_each_other_in_one_direction() -> None:
    """Rooms that use no others are taken away until none is left, unless there is a circle."""
    left = {room: {*may.split()} - {"torch"} for room, may in MAY_USE.items()}
    while free := [room for room, uses in left.items() if not uses & left.keys()]:
        for room in free:
            del left[room]
    assert {} == left


@pytest.mark.parametrize(("file", "name"), sorted(FRONT_DOORS))
def test_front_door_is_in_use(file: str, name: str) -> None:
    assert name in imported_names_of_file(SRC / file)


def test_no_two_files_have_the_same_name() -> None:
    counts = Counter(path.name for path in SOURCE_FILES if path.name != "__init__.py")
    assert [] == [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("sim", "from penstock.ir.action import Action", ""),
        ("sim", "from penstock import ir, errors", ""),
        ("sim", "from .cost import CostTable", ""),
        ("backward", "import torch", ""),
        ("ir", "import torchlike, penstockish, json", ""),
        ("ir", "from penstock import sim", "may not use sim"),
        ("ir", "from ..sim.engine import run", "may not use sim"),
        ("ir", "def f():\n    import penstock.sim as s", "may not use sim"),
        ("draw", "def f():\n    from torch.nn import Module", "may not use torch"),
        ("cli", "import penstock", "import it from the room that defines it"),
        ("cli", "from penstock import stage_backward", "import it from the room that defines it"),
        ("turbine", "", "turbine is not a room yet: add what it may use"),
    ],
)
def test_import_that_the_table_does_not_allow_is_found(room: str, source: str, fault: str) -> None:
    found = find_faults(room, imported_names(source, f"penstock.{room}"))
    assert ([fault] if fault else []) == [fault for each in found if fault in each]
    assert bool(fault) == bool(found)
