"""The transports, from the fastest to the most general. A new one is a folder, a line here, and a
name in `config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from instep.errors import TransportError
from instep.protocol import Manifest
from instep.transport import Transport
from instep.transport.broadcast.publish import BroadcastTransport
from instep.transport.broadcast.read import StagedReader, StreamReader
from instep.transport.http.publish import HttpTransport
from instep.transport.http.read import HttpReader
from instep.transport.ipc.publish import IpcTransport
from instep.transport.ipc.read import IpcReader
from instep.transport.reader import Reader, WorkerContext
from instep.transport.shm.publish import ShmTransport
from instep.transport.shm.read import ShmReader


class Ends(NamedTuple):
    """Both ends of a transport. publish: makes the trainer's end, from the seconds that it may
    wait. read: opens a version in a worker. brief: see `Reader.brief`."""

    publish: Callable[[float], Transport]
    read: Callable[[Manifest, WorkerContext], Reader]
    brief: Callable[[int], bool] = Reader.brief


TRANSPORTS = {
    "ipc": Ends(lambda _: IpcTransport(), IpcReader),
    "nccl": Ends(lambda timeout: BroadcastTransport("nccl", timeout), StreamReader),
    "shm": Ends(lambda _: ShmTransport(), ShmReader, ShmReader.brief),
    "gloo": Ends(lambda timeout: BroadcastTransport("gloo", timeout), StagedReader),
    "http": Ends(lambda _: HttpTransport(), HttpReader),
}


def brief(transport: str, nbytes: int) -> bool:
    """Whether `open_location` and the sums of a version take less time than a thread takes to
    start. transport, nbytes: of its location."""
    return transport in TRANSPORTS and TRANSPORTS[transport].brief(nbytes)


def open_location(manifest: Manifest, me: WorkerContext) -> Reader:
    """Opens a manifest's version. Raises `TransportError` where it cannot be opened from this
    process."""
    kind = manifest.location.transport
    if kind not in TRANSPORTS:
        raise TransportError(f"this worker does not know the transport {kind!r}; known: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[kind].read(manifest, me)
