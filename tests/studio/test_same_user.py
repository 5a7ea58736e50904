"""The studio answers the user who runs it, and no other user of the machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.studio.same_user import OnlyThisUser, find_user
from penstock.studio.server import make_app
from studio_process import studio

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux names users")
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).status)"
NOBODY = 65534


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_user_of_a_connection_is_found(family: socket.AddressFamily) -> None:
    """Sockets of version 6 reach addresses of version 4 too, and are listed apart."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        port = server.getsockname()[1]
        client.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
        own = client.getsockname()[1]
        assert os.getuid() == find_user(own, port)
        assert find_user(own, own) is None


def test_connection_of_an_unknown_user_is_refused() -> None:
    with TestClient(OnlyThisUser(make_app()), base_url="http://127.0.0.1:8787") as client:
        answer = client.get("/")
    assert 403 == answer.status_code
    assert "Only the user who runs the studio may use it." == answer.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another user")
def test_other_users_are_refused() -> None:
    with studio("--port", 0) as running:
        address = running.address.split("?")[0]
        command = ["/usr/bin/python3", "-c", ASK, address]
        if not Path(command[0]).exists():
            command[0] = sys.executable
        for user, expected in ((None, "200"), (NOBODY, "HTTP Error 403: Forbidden")):
            asked = subprocess.run(command, capture_output=True, text=True, user=user, cwd="/")
            assert expected in asked.stdout + asked.stderr
