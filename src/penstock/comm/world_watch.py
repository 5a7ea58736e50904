"""The watch over all ranks of the world: how its sentinels find each other through the store.

The first rank that needs the watch makes its sentinel the hub, and puts the address and a secret
into the store; the others read them there. A rank takes part from its first pipeline on.
"""

import atexit
import contextlib
import ipaddress
import json
import logging
import os
import secrets
import socket
import struct
import sys
import traceback
import weakref
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import parent_process, util
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock.watch.rank_watch import RankWatch

LOGGER = logging.getLogger("penstock")

_MEETING_S = 30.0
_NAMING_S = 2.0
"""How long a rank whose collective failed waits for the name of a dead one."""
_LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # The ioctl SIOCGIFADDR: see netdevice(7).

# The sentinel belongs to the process, and all pipelines of a world share it: it ends with the
# world's group. None is for a world that is not watched.
_WATCHES: "weakref.WeakKeyDictionary[dist.ProcessGroup, RankWatch | None]" = (
    weakref.WeakKeyDictionary()
)


def watch_world() -> RankWatch | None:
    """Return this rank's part in the watch over its world, and take part if it does not yet.

    None if there is nobody to watch, with PENSTOCK_WATCH=0, or where it is not possible.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 1 or os.environ.get("PENSTOCK_WATCH") == "0":
        return None
    if world not in _WATCHES:
        _WATCHES[world] = _take_part(world)
    watch = _WATCHES[world]
    return watch if watch is not None and watch.is_of_this_process() else None


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Show `what` to the others, in words that follow a verb, if this rank dies meanwhile."""
    world = dist.group.WORLD if dist.is_initialized() else None
    watch = None if world is None else _WATCHES.get(world)
    if watch is None:
        yield
        return
    before = watch.place.enter(what)
    try:
        yield
    finally:
        watch.place.go_back(before)


def _take_part(world: dist.ProcessGroup) -> RankWatch | None:
    rank = dist.get_rank()
    if sys.platform != "linux":
        LOGGER.info("rank %d is not watched: that needs Linux.", rank)
        return None
    watch: RankWatch | None = None
    try:
        watch = RankWatch.start(rank)
        _meet(watch, world.get_group_store())
    except (OSError, RuntimeError, ValueError) as exc:
        if watch is not None:
            watch.leave()
        LOGGER.warning("rank %d is not watched: %s.", rank, exc)
        return None
    of_world = weakref.ref(world)
    watch.is_needed = lambda: dist.group.WORLD is not None and dist.group.WORLD is of_world()
    weakref.finalize(world, watch.leave).atexit = False
    if parent_process() is None:
        atexit.register(_end_with_process, watch)
    else:  # Processes of multiprocessing do not run what is registered with atexit.
        util.Finalize(None, _end_with_process, args=(watch,), exitpriority=0)
    return watch


def _end_with_process(watch: RankWatch) -> None:
    """Leave at the end of the process, unless it failed: then its sentinel tells the others.

    A collective of the user's own fails before the watch knows why: it is given time to say so.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        watch.leave()
    elif _is_of_torch(error):
        watch.await_findings(_NAMING_S)


def _is_of_torch(error: BaseException) -> bool:
    """Return whether torch.distributed has raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    folder = str(Path(dist.__file__).parent)
    return bool(frames) and frames[-1].f_code.co_filename.startswith(folder)


def _meet(watch: RankWatch, store: distributed_c10d.Store) -> None:
    """Make the sentinel the hub, or let it report to the hub."""
    store = distributed_c10d.PrefixStore("penstock/watch", store)
    # A store can outlive a group; ranks match their worlds by how many they have had.
    number = store.add(f"worlds of rank {watch.rank}", 1)
    store = distributed_c10d.PrefixStore(str(number), store)
    if store.add("ranks", 1) > 1:
        store.wait(["hub"], timedelta(seconds=_MEETING_S))
        hub = json.loads(store.get("hub"))
        if hub is None:
            raise OSError("the first rank could not start a hub")
        watch.join(hub)
        return
    hub = None
    try:
        address, secret = address_among_ranks(), secrets.token_hex(16)
        port = watch.listen(address, secret)
        hub = {"address": address, "port": port, "secret": secret}
        hub |= {"hub_rank": watch.rank, "hub_host": socket.gethostname()}
    finally:
        store.set("hub", json.dumps(hub))


def address_among_ranks() -> str:
    """Return the address of this host at which all other ranks of the world can reach it."""
    world = dist.group.WORLD
    assert world is not None
    return own_address(_host_of(world.get_group_store()), dist.get_world_size())


def _host_of(store: distributed_c10d.Store) -> str:
    """Return the host that keeps the store; empty if it is not on a network."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def own_address(store_host: str, num_ranks: int) -> str:
    """Return the address of this host at which the others can reach it, and no wider one.

    It is on the interface that leads to the host of the store, as all ranks reach that one; on that
    host itself, the interface of gloo, or the one of the host's name.
    """
    per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_local = store_host in ("", "localhost") or _is_loopback(store_host)
    if per_host == str(num_ranks) or (is_local and not per_host):
        return _LOOPBACK
    found = [] if is_local else [_address_towards(store_host)]
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        found.append(_address_of(interface))
    found.append(_address_towards(socket.gethostname()))
    for address in found:
        if address and not _is_loopback(address):
            return address
    raise OSError(
        f"no address of this host is known at which others can reach it (the store is on "
        f"{store_host}). Expected a host name that resolves, or GLOO_SOCKET_IFNAME with the name "
        "of the interface that leads to the other hosts"
    )


def _address_towards(host: str) -> str:
    """Return this host's address on the way to another; empty if the name does not resolve."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # Sends nothing.
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _address_of(interface: str) -> str:
    """Return the address of an interface; empty if it has none."""
    import fcntl  # Windows lacks it.

    asked = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, asked)[20:24])
    except OSError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
