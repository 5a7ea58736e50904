"""Start the studio at an address on this machine, until Ctrl-C."""

import logging
import os
import socket
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import NoReturn
from urllib.parse import urlencode

from penstock.errors import OptionError
from penstock.extras import needed_by

HOST = "127.0.0.1"
USUAL_PORT = 8787


def serve(fields: Mapping[str, str], *, port: int | None, is_opened: bool) -> NoReturn:
    """Serve the page until Ctrl-C, and then end the process.

    `fields` are those that differ from their defaults. Without `port` the usual port is used, so
    that bookmarks keep working, or any free port if it is in use.
    """
    packages = ["anyio", "starlette", "uvicorn"]
    with needed_by("the studio", packages, extra="studio", error=OptionError):
        import uvicorn

        from penstock.studio.same_user import OnlyThisUser
        from penstock.studio.server import make_app
    # Ctrl-C is the way to stop the studio, at any moment.
    with suppress(KeyboardInterrupt), _listen(port) as listener:
        query = urlencode(fields)
        address = f"http://{HOST}:{listener.getsockname()[1]}/" + (f"?{query}" if query else "")
        print(f"The studio is at {address}", flush=True)
        print("Ctrl-C stops it.", flush=True)
        if is_opened and has_screen():
            # In a thread: this call may wait for the browser, which waits for the page.
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            OnlyThisUser(make_app()),
            log_level="critical",  # Connections still open at shutdown are not errors.
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        # At shutdown, asyncio would warn about searches that are stopped.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        uvicorn.Server(config).run(sockets=[listener])
    print("The studio has stopped.", flush=True)
    os._exit(0)  # Do not wait for drawings that are still being made.


def _listen(port: int | None) -> socket.socket:
    try:
        return socket.create_server((HOST, USUAL_PORT if port is None else port))
    except OSError as exc:
        if port is None:
            return socket.create_server((HOST, 0))
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        raise OptionError(
            f"--port is {port}, which cannot be used: {reason}. Give another port, or leave it out."
        ) from exc


def has_screen() -> bool:
    """Return whether there is a screen; without one, a browser could only open in the terminal."""
    is_linux = sys.platform.startswith("linux")
    return not is_linux or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
