"""Starts the studio: an address on this machine, until Ctrl-C."""

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
    """Serves the page until Ctrl-C, and then ends the process.

    `fields` are those that differ from their defaults. Without a port the usual one is taken, so
    that an address can be kept, or any other if it is in use.
    """
    packages = ["anyio", "starlette", "uvicorn"]
    with needed_by("the studio", packages, extra="studio", error=OptionError):
        import uvicorn

        from penstock.studio.server import make_app
    # Ctrl-C is how one leaves, at any moment.
    with suppress(KeyboardInterrupt), _listen(port) as listener:
        query = urlencode(fields)
        address = f"http://{HOST}:{listener.getsockname()[1]}/" + (f"?{query}" if query else "")
        print(f"The studio is at {address}", flush=True)
        print("Ctrl-C stops it.", flush=True)
        if is_opened and has_screen():
            # Some browsers are waited for, and those wait for the page.
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            make_app(),
            log_level="critical",  # Whoever is still answered at the end is no error.
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        # At the end asyncio would warn of searches that are stopped.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        uvicorn.Server(config).run(sockets=[listener])
    print("The studio has stopped.", flush=True)
    os._exit(0)  # What is still being drawn, nobody waits for.


def _listen(port: int | None) -> socket.socket:
    try:
        return socket.create_server((HOST, USUAL_PORT if port is None else port))
    except OSError as exc:
        if port is None:
            return socket.create_server((HOST, 0))
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        raise OptionError(
            f"--port is {port}, and that cannot be used: {reason}. Give another one, or leave it "
            "out."
        ) from exc


def has_screen() -> bool:
    """Without one, a browser would open in the terminal, if at all."""
    is_linux = sys.platform.startswith("linux")
    return not is_linux or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
