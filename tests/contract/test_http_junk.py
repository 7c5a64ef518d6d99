"""What is no request, sent to a real server over real sockets: nothing changes, and nobody has to wait."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from helpers.junk import attack
from helpers.memory_server import TOKEN, Process
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http import HttpEngine

NOISE = {
    "zeros": b"\x00" * 1000,
    "a negative length": b"POST /instep/v1/hello HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "an endless line": b"GET " + b"x" * 200_000,
    "nothing": b"\r\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    server = Process()
    yield server
    server.kill()


def push(server: Process, seed: int, version: str) -> None:
    with WeightSync(attention(seed), [HttpEngine(server.url, TOKEN)]) as sync:
        sync.push(version)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_thousands_of_malformed_requests_over_a_socket(server: Process, count: int) -> None:
    push(server, 2, f"sound-{count}")

    async def main() -> tuple[Counter[int], int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def generate() -> None:
                assert (await http.post("/v1/completions")).raise_for_status().json()["version"] == f"sound-{count}"

            return await attack(http, TOKEN, count, generate)

    codes, ended = asyncio.run(main())
    assert codes.total() == count
    assert ended > 10
    assert server.serves() == {"version": f"sound-{count}", "fingerprint": str(MemoryEngine(attention(2)).fingerprint()), "paused": False}
    push(server, 3, f"sound-again-{count}")


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_what_is_no_http_at_all(server: Process, noise: bytes) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as sock, suppress(OSError):
            sock.sendall(noise)
    assert server.health() == 200


def test_a_body_that_never_comes_holds_nobody_up(server: Process) -> None:
    head = f"POST /instep/v1/prepare HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-type: application/msgpack\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + b"content-length: 1000000\r\n\r\n")
        push(server, 1, "meanwhile")
