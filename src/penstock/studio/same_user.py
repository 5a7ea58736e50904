"""Connections of other users of this machine, who can reach the studio's address too.

Linux lists each connection with the user who made it, in /proc/net/tcp:

    sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
     7: 0100007F:C0DE 0100007F:2253 01 00000000:00000000 00:00000000 00000000  1000 ...
"""

import os
from collections.abc import Iterator
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _USER = 1, 2, 7


class OnlyThisUser:
    """Middleware that answers only the user who runs the studio, where the system says who asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _TABLES[0].exists():
            client, server = scope.get("client"), scope.get("server")
            user = find_user(client[1], server[1]) if client and server else None
            if user != os.getuid():
                answer = Response("Only the user who runs the studio may use it.", 403)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def find_user(port: int, server_port: int) -> int | None:
    """Return the user of the connection from one local port to another; None if there is none."""
    for local, remote, user in _connections():
        if (port, server_port) == (_port_of(local), _port_of(remote)):
            return user
    return None


def _connections() -> Iterator[tuple[str, str, int]]:
    for table in _TABLES:
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                yield columns[_LOCAL], columns[_REMOTE], int(columns[_USER])


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
