"""How processes of several hosts find each other: PyTorch's TCPStore, and the addresses that lead
to it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from instep.errors import TransportError

GAVE_UP = "gave up"
"""The key under which a rank writes why it gives up."""


def serve(host: str, port: int = 0) -> Any:
    """Serves a store on this interface alone, at a free port unless one is given. Other ranks need
    its `host` and `port`."""
    listener = socket.create_server((host, port), backlog=1024, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    found = listener.getsockname()[1]
    try:
        return TCPStore(host, found, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except Exception as error:
        raise TransportError(f"cannot serve a store at {host} port {found}: {error}") from error


def find(host: str, port: int, timeout: float) -> Any:
    """Connects to the store that another process serves. Raises `TransportError` where none answers
    in time."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except Exception as error:
        raise TransportError(
            f"the group's store at {host} port {port} does not answer: {first_line(error)}",
            next_step="the trainer must run, and its address and port must be open to engines",
        ) from error


def give_up(store: Any, key: str, reason: str) -> None:
    """Ends the waits of every rank of a group, even while the group is still being made."""
    tell(PrefixStore(key, store), reason)


def tell(store: Any, reason: str) -> None:
    """Writes why this rank gives up, unless another rank has written its reason. Never raises."""
    with suppress(Exception):
        if not store.check([GAVE_UP]):  # the first reason is the one to tell
            store.set(GAVE_UP, reason)


def address_towards(host: str) -> str:
    """Returns this machine's address on the interface that leads to `host`. Nothing is sent."""
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))
        except OSError as error:
            raise TransportError(f"no interface of this machine leads to {host}: {error}") from error
        address: str = probe.getsockname()[0]
        return address


def own_address() -> str:
    """Returns the address at which other hosts find this one: `MASTER_ADDR` where a launcher has
    set it, or the interface of the default route."""
    given = os.environ.get("MASTER_ADDR", "")
    resolved = socket.gethostbyname(given) if given else "127.0.0.1"
    return address_towards("192.0.2.1") if resolved.startswith("127.") else resolved


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
