"""HTTP, for engines that nothing faster reaches: the trainer serves a version's bytes, workers
fetch them in as many pieces as it takes.

The version is copied into the trainer's memory, as for `shm`. Its path is a secret of its own, made
anew for each version and told in the manifest alone. Nothing is encrypted: like `gloo`, it is for
networks that are trusted.
"""

from __future__ import annotations

import hmac
import mmap
import re
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec import structs

from instep.digest import Bytes
from instep.errors import InstepError, TransportError
from instep.forked import Own
from instep.protocol import Identity, TensorMeta
from instep.transport import Published, elsewhere
from instep.transport.shm.publish import ShmTransport
from instep.transport.shm.segment import Segment
from instep.transport.store import own_address

T = TypeVar("T")
CHUNK = 1 << 20
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
IDLE = 30.0  # seconds that a connection may say nothing


class HttpTransport(ShmTransport):
    """The trainer's side. It listens on the loopback interface while all engines are on this
    host."""

    kind = "http"

    def __init__(self) -> None:
        super().__init__()
        self.host = "127.0.0.1"
        self.server: _Server | None = None
        self.given_up: set[str] = set()

    def why_not(self, _: torch.device, workers: Sequence[Identity]) -> str | None:
        self.host = "127.0.0.1" if elsewhere(workers) is None else own_address()
        return None

    def publish(self, tensors: list[TensorMeta], values: Iterable[tuple[str, torch.Tensor]]) -> Published:
        published = super().publish(tensors, values)
        if self.server is None or self.server.server_address[0] != self.host:
            self._stop()
            self.server = _Server(self.host, weakref.WeakMethod(self.offered))
            weakref.finalize(self, self.server.stop)
        location = published.location
        address = f"{self.host}@{self.server.server_port}@{location.address}"
        return replace(published, location=structs.replace(location, address=address))

    async def abort_on_failure(self, step: Awaitable[T]) -> T:
        try:
            return await step
        except InstepError:
            self.given_up.update(self.segments)  # nobody waits for the rest
            raise

    def offered(self, secret: str) -> Segment | None:
        """Returns the memory behind a path. None where there is none, or none any more."""
        found: Segment | None = None
        for name, memory in list(self.segments.items()):
            if hmac.compare_digest(name.encode(), secret.encode()) and name not in self.given_up:
                found = memory
        return found

    def new_segment(self, size: int) -> Memory:
        return Memory(size)

    def release_all_but(self, held: Set[str]) -> None:
        super().release_all_but({address.rpartition("@")[2] for address in held})
        self.given_up &= self.segments.keys()

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class Memory(Segment):
    """Anonymous memory of the trainer instead of a file, under a name that cannot be guessed."""

    def __init__(self, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        self.name = uuid.uuid4().hex
        try:
            self.map = mmap.mmap(-1, self.size)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"there is no memory for a copy of the model, {self.size >> 20} MiB: {error}") from error
        self.view: Bytes = np.frombuffer(self.map, np.uint8)

    def renamed(self) -> Memory:
        self.name = uuid.uuid4().hex
        return self

    def close(self) -> None:
        del self.view
        with suppress(BufferError):  # unmapped with the last view
            self.map.close()


class _Server(ThreadingHTTPServer):
    """An HTTP server on a free port, in a thread."""

    daemon_threads = True

    def __init__(self, host: str, offered: Callable[[], Callable[[str], Segment | None] | None]) -> None:
        self.find, self.own = offered, Own()
        try:
            super().__init__((host, 0), _Handler)
        except OSError as error:
            raise TransportError(f"cannot listen at {host}: {error}") from error
        threading.Thread(target=self.serve_forever, args=(0.05,), name="instep-http-bytes", daemon=True).start()

    def offered(self, secret: str) -> Segment | None:
        find = self.find()
        return find(secret) if find is not None else None

    def handle_error(self, *_: Any) -> None:
        """Prints nothing when a peer leaves: it connects again, or its engine reports why not."""

    def stop(self) -> None:
        if self.own.here():  # the thread that would end is not in a child that was forked
            self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE

    def do_GET(self) -> None:
        secret = self.path.removeprefix("/")
        memory = self.server.offered(secret)
        asked = RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        if memory is None or asked is None:
            return self.send_error(404 if memory is None else 416)
        low, high = int(asked[1]), min(int(asked[2] or memory.size - 1), memory.size - 1)
        if low > high:
            return self.send_error(416)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {low}-{high}/{memory.size}")
        self.send_header("Content-Length", str(high + 1 - low))
        self.end_headers()
        for at in range(low, high + 1, CHUNK):
            if self.server.offered(secret) is not memory:
                self.close_connection = True
                return None
            self.wfile.write(memory.view[at : min(at + CHUNK, high + 1)].data)
        return None

    def log_message(self, *_: Any) -> None:
        """Logs nothing, because paths are secret."""
