"""HTTP as a way for the bytes: whole, in pieces, and refused."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import bits, checkpoint, described
from msgspec import structs

from instep import MemoryEngine, WeightSync
from instep.errors import EngineTimeout, TransportError
from instep.protocol import Manifest
from instep.transport.http import publish as transport_http
from instep.transport.http import read as http_reader
from instep.transport.http.publish import HttpTransport
from instep.transport.http.read import HttpReader
from instep.transport.reader import WorkerContext

SIZE = 1 << 20


@pytest.fixture
def transport() -> Iterator[HttpTransport]:
    transport = HttpTransport()
    yield transport
    transport.close()


def published(transport: HttpTransport, seed: int = 1, **tensors: torch.Tensor) -> Manifest:
    values = tensors or checkpoint(seed)
    found = transport.publish(described(values), values.items())
    return Manifest("v", None, described(values), found.digests, found.location)


def large(seed: int = 0) -> torch.Tensor:
    return torch.randn(4 * SIZE, generator=torch.Generator().manual_seed(seed))


def ask(manifest: Manifest, path: str | None = None, **headers: str) -> tuple[int, bytes]:
    host, port, secret = manifest.location.address.split("@")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", path or f"/{secret}", headers=headers)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


def read(manifest: Manifest, timeout: float = 20.0) -> HttpReader:
    reader = HttpReader(manifest, WorkerContext("worker", timeout))
    assert reader.arrive(manifest.tensors) == manifest.digests
    return reader


def test_every_tensor_arrives(transport: HttpTransport) -> None:
    manifest = published(transport)
    reader = read(manifest)
    for meta in manifest.tensors:
        assert torch.equal(bits(reader.tensor(meta)), bits(checkpoint(1)[meta.name]))
    assert reader.close()


def test_it_listens_on_the_loopback_while_all_engines_are_here(transport: HttpTransport) -> None:
    with WeightSync(checkpoint(1), [MemoryEngine(checkpoint(0))], transport="http") as sync:
        sync.push("v1")
        assert sync._session.current is not None
        assert sync._session.current.published.location.address.startswith("127.0.0.1@")


class Cutting:
    """Stands between worker and trainer, and ends each connection after `after` bytes."""

    def __init__(self, manifest: Manifest, after: int) -> None:
        host, port, secret = manifest.location.address.split("@")
        self.there, self.after, self.count = (host, int(port)), after, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.manifest = structs.replace(
            manifest, location=structs.replace(manifest.location, address=f"127.0.0.1@{self.listener.getsockname()[1]}@{secret}")
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            with peer, socket.create_connection(self.there) as trainer:
                trainer.sendall(peer.recv(1 << 16))
                left = self.after
                while left > 0 and (data := trainer.recv(min(left, 1 << 16))):
                    peer.sendall(data)
                    left -= len(data)


def test_it_goes_on_where_the_connection_ended(transport: HttpTransport) -> None:
    manifest = published(transport, weight=large())
    cutting = Cutting(manifest, after=3 * SIZE)
    reader = read(cutting.manifest)
    assert torch.equal(reader.tensor(manifest.tensors[0]), large())
    assert cutting.count == reader.attempts == 6  # 16 MiB by 3
    cutting.listener.close()


def test_a_peer_that_sends_nothing_ends_in_time(transport: HttpTransport) -> None:
    cutting = Cutting(published(transport, weight=large()), after=0)
    started = time.monotonic()
    with pytest.raises(TransportError, match="0 of 16777216 bytes came from the trainer"):
        read(cutting.manifest, timeout=1)
    assert time.monotonic() - started < 10
    cutting.listener.close()


def test_a_trainer_that_is_gone_ends_it_before_the_deadline(transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reader, "STALL", 0.5)
    manifest = published(transport)
    transport.close()
    started = time.monotonic()
    with pytest.raises(TransportError, match="ConnectionRefusedError"):
        read(manifest, timeout=600)
    assert time.monotonic() - started < 20


def test_a_reader_that_nobody_wants_stops_at_once(transport: HttpTransport) -> None:
    """A worker's step waits for it."""
    manifest = published(transport, weight=large())
    silent = socket.create_server(("127.0.0.1", 0))
    _, _, secret = manifest.location.address.split("@")
    address = f"127.0.0.1@{silent.getsockname()[1]}@{secret}"
    reader = HttpReader(
        structs.replace(manifest, location=structs.replace(manifest.location, address=address)), WorkerContext("worker", 600)
    )
    caught: list[Any] = []

    def arrive() -> None:
        try:
            reader.arrive(manifest.tensors)
        except TransportError as error:
            caught.append(error)

    thread = threading.Thread(target=arrive)
    thread.start()
    peer, _ = silent.accept()
    reader.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert len(caught) == 1
    peer.close()
    silent.close()


def test_paths_are_secret_and_end_with_their_version(transport: HttpTransport) -> None:
    manifest = published(transport)
    secret = manifest.location.address.split("@")[2]
    for wrong in ("/", "/" + secret[:-1], "/" + "0" * 32, "/../" + secret, "/" + secret + "/x"):
        assert ask(manifest, wrong)[0] == 404
    assert ask(manifest)[0] == 206
    transport.release_all_but({manifest.location.address})
    assert ask(manifest)[0] == 206
    transport.release_all_but(set())
    assert ask(manifest)[0] == 404
    with pytest.raises(TransportError, match="does not offer this version any more"):
        read(manifest)
    assert published(transport, 2).location.address != manifest.location.address


@pytest.mark.parametrize("asked", ["bytes=9-3", "bytes=99999999999-", "bytes=-5", "bytes=a-b", "bytes=0-1,3-4", "lines=1-2"])
def test_ranges_that_are_none(transport: HttpTransport, asked: str) -> None:
    assert ask(published(transport), Range=asked)[0] == 416


def test_a_range_is_the_bytes_that_were_asked_for(transport: HttpTransport) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    manifest = published(transport, weight=values)
    assert ask(manifest, Range="bytes=16-31") == (206, bytes(range(16, 32)))


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1@80@x", "http://127.0.0.1:80/" + "0" * 32, "a@b@" + "0" * 32, "127.0.0.1@80@" + "0" * 33]
)
def test_an_address_is_a_trainers(transport: HttpTransport, address: str) -> None:
    manifest = published(transport)
    with pytest.raises(TransportError, match="address"):
        HttpReader(structs.replace(manifest, location=structs.replace(manifest.location, address=address)), WorkerContext("worker", 1))


def test_bytes_that_were_changed_on_the_way_are_found_out(transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = published(transport)
    memory = next(iter(transport.segments.values()))
    memory.view[3] ^= 1
    reader = HttpReader(manifest, WorkerContext("worker", 20))
    assert reader.arrive(manifest.tensors) != manifest.digests


def test_it_is_taken_where_nothing_else_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory is full, and the group cannot be joined."""
    full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(checkpoint(1), [engine]) as sync:
        gloo = sync._session.transport.candidates["gloo"]
        monkeypatch.setattr(gloo, "why_not", lambda *_: "a wall is in between")
        sync.push("v1")
        assert sync._session.current is not None
        assert sync._session.current.published.location.transport == "http"
    assert engine.fingerprint() == MemoryEngine(checkpoint(1)).fingerprint()


def test_one_engine_that_fails_ends_the_others_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = MemoryEngine(checkpoint(0), name="good"), MemoryEngine(checkpoint(0), name="bad")
    bad.inject("prepare", "hang")
    offered = HttpTransport.offered

    def slowly(self: HttpTransport, secret: str) -> Any:
        time.sleep(0.2)
        return offered(self, secret)

    monkeypatch.setattr(transport_http, "CHUNK", 64)
    monkeypatch.setattr(HttpTransport, "offered", slowly)
    with WeightSync(checkpoint(1), [good, bad], transport="http", timeout=1) as sync, pytest.raises(EngineTimeout):
        sync.push("v1")
    started = time.monotonic()
    assert good.fingerprint() == MemoryEngine(checkpoint(0)).fingerprint()
    good.receivers[0].checker.shutdown(wait=True)  # its fetch has ended
    assert time.monotonic() - started < 10


def test_nothing_is_left_in_shared_memory(segments: Path) -> None:
    with WeightSync(checkpoint(1), [MemoryEngine(checkpoint(0))], transport="http") as sync:
        for version in "abc":
            sync.push(version)
        assert list(segments.iterdir()) == []
