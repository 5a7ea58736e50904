"""A rank that is killed, stopped or cut off is named by all others, on all hosts."""

from pathlib import Path

import pytest

from faulty_ranks import Fault, strike, until
from limits import HANG_S
from network_hosts import Hosts

pytestmark = pytest.mark.dist

NAMED_S = 10.0  # What users are promised.
LAYOUT = [0, 1, 1, 2]  # The host of each rank.


def _shared_memory() -> set[str]:
    """The files there, without the locks of Python's own, which end with the fork server."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


# benchmarks/faults has all faults in all places.
@pytest.mark.parametrize(
    ("fault", "how", "place"),
    [
        (Fault("kill", "I", 1, 2), "was killed by SIGKILL", "in step 3, in 1I"),
        (
            Fault("stop", "the checkpoint", 3, 1),
            "has been stopped by a signal for 5 s",
            "to save the training",
        ),
        (Fault("cut", "F", 2, 2), "does not answer (for 6 s: its host", "last heard of"),
    ],
)
def test_a_dead_rank_is_named_by_all_others(
    hosts: Hosts, tmp_path: Path, fault: Fault, how: str, place: str
) -> None:
    before = _shared_memory()
    named = strike(hosts, LAYOUT, fault, tmp_path)
    is_cut = fault.kind == "cut"
    far = [rank for rank, host in enumerate(LAYOUT) if host != LAYOUT[fault.victim]]
    # torchrun ends the ranks of its own host as soon as one of them was killed.
    stopped = [rank for rank in range(len(LAYOUT)) if rank != fault.victim]
    others = stopped if fault.kind == "stop" else far
    dead = [1, 2] if is_cut else [fault.victim]  # A cut takes all ranks of the host along.
    hub_is_cut = is_cut and all(named[rank].text.count("this one") for rank in others)
    for rank in others:
        after_s, text = named[rank]
        assert after_s < NAMED_S, text
        begin = [f"rank {rank}: rank {one} (host {hosts.name(LAYOUT[one])}" for one in dead]
        assert text.startswith(tuple(begin)), text
        assert how in text or hub_is_cut
        assert place in text
    if is_cut:  # Those that are cut off know only that they are.
        for rank in (1, 2):
            assert named[rank].after_s < NAMED_S
            assert "does not answer" in named[rank].text
    assert until(lambda: hosts.processes() == [], HANG_S)
    assert before == _shared_memory()
