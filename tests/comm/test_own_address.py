"""The address at which the hub of the watch listens."""

import sys

import pytest

from penstock.comm.world_watch import own_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watch needs Linux")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("store_host", ["", "localhost", "127.0.0.1", "::1"])
def test_a_store_of_this_host_alone_needs_no_other_address(store_host: str) -> None:
    assert "127.0.0.1" == own_address(store_host, 4)


def test_ranks_that_are_all_on_one_host_need_no_other_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "127.0.0.1" == own_address("10.77.0.1", 4)


def test_a_host_without_an_address_for_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at 127.0.0.1 would be out of reach, and nobody would know why."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(OSError, match=r"no address of this host is known .* GLOO_SOCKET_IFNAME"):
        own_address("localhost", 4)


def test_an_interface_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    monkeypatch.setattr("socket.gethostname", lambda: "name.invalid")
    with pytest.raises(OSError, match="the store is on localhost"):
        own_address("localhost", 4)
