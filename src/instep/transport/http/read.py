"""A worker's side of `http`: fetches a version into memory of its own, in as many pieces as the
network makes of it."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Generator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse

from instep.errors import TransportError
from instep.protocol import Manifest, TensorMeta
from instep.transport.mapped import Staged
from instep.transport.reader import WorkerContext

ADDRESS = re.compile(r"([\w.:-]+)@(\d{1,5})@([0-9a-f]{32})")
CHUNK = 1 << 20
CONNECT = 5.0  # seconds
STALL = 20.0  # seconds without a byte after which the trainer is taken for gone
AGAIN = 0.2  # seconds between two attempts


class HttpReader(Staged):
    """A worker's side. attempts: how many connections it has tried."""

    def __init__(self, manifest: Manifest, me: WorkerContext) -> None:
        found = ADDRESS.fullmatch(manifest.location.address)
        if found is None:
            raise TransportError("the manifest's address is none of an HTTP server")
        self.host, self.port, self.path = found[1], int(found[2]), "/" + found[3]
        self.attempts = 0
        self.stopped = threading.Event()
        self.connection: HTTPConnection | None = None
        super().__init__(manifest, me)

    def arrive(self, _: list[TensorMeta]) -> dict[str, int]:
        room = memoryview(self.room.numpy().data)
        try:
            self._fetch(room[: self.size])
        finally:
            room.release()
            del self.room
        return self.places.digests(self.bytes)

    def stop(self) -> None:
        self.stopped.set()
        connection = self.connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _fetch(self, room: memoryview) -> None:
        """Fetches the version into `room`. Raises `TransportError` where the trainer no longer
        offers it, or no byte comes for too long."""
        at, heard = 0, time.monotonic()
        deadline = heard + self.me.timeout
        while at < len(room):
            self.attempts += 1
            try:
                with closing(self._pieces(room, at)) as pieces:
                    for got in pieces:
                        at, heard = at + got, time.monotonic()
                        if heard > deadline:
                            raise TimeoutError(f"not done within {self.me.timeout:g} s")
                problem = "the connection ended"
            except (OSError, HTTPException) as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            if at < len(room) and (self.stopped.wait(AGAIN) or time.monotonic() > min(deadline, heard + STALL)):
                raise TransportError(
                    f"{at} of {len(room)} bytes came from the trainer at {self.host} port {self.port}: {problem}",
                    next_step="the trainer must run and its port be open to engines; a slow network needs a longer timeout",
                )

    def _pieces(self, room: memoryview, at: int) -> Generator[int]:
        """Fetches bytes from `at` on over one connection, as many as come. Yields the size of each
        piece."""
        self.connection = connection = HTTPConnection(self.host, self.port, timeout=min(CONNECT, self.me.timeout))
        try:
            connection.connect()
            connection.sock.settimeout(min(STALL, self.me.timeout))
            if self.stopped.is_set():  # before there was a socket to shut
                return
            connection.request("GET", self.path, headers={"Range": f"bytes={at}-{len(room) - 1}"})
            answer = connection.getresponse()
            _check(answer, at)
            while got := answer.readinto(room[at : at + CHUNK]):
                yield got
                at += got
        finally:
            self.connection = None
            connection.close()


def _check(answer: HTTPResponse, at: int) -> None:
    if answer.status == 404:
        raise TransportError("the trainer does not offer this version any more")
    if answer.status != 206 or not answer.getheader("Content-Range", "").startswith(f"bytes {at}-"):
        raise TransportError(f"what answers at the trainer's address gives no parts: {answer.status}")
