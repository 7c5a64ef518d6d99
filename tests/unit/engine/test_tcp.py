"""The TCP way to an engine: who is let in, what a stranger can do, and how a connection ends and comes back."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from instep.engine.remote.rpc import GONE
from instep.engine.remote.tcp import Hello, TcpDoor, TcpListener, TcpRpc
from instep.errors import EngineLost, TransportError
from instep.protocol import encode

TOKEN = "a secret"


class Echo:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def answer(self, method: str, payload: bytes) -> bytes:
        self.asked.append(method)
        if method == "hang":
            await asyncio.Event().wait()
        return payload


@pytest.fixture
def listener() -> Iterator[TcpListener]:
    listener = TcpListener("localhost", 0, TOKEN)
    yield listener
    listener.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def door(listener: TcpListener, echo: Echo) -> Iterator[TcpDoor]:
    door = TcpDoor("localhost", listener.port, TOKEN, name="engine")
    door.serve(echo.answer)
    yield door
    door.close()


def call(rpc: TcpRpc, payload: bytes = b"hello") -> bytes:
    return asyncio.run(asyncio.wait_for(rpc.call("echo", payload), 20))


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_engine_with_another_token_is_not_let_in(listener: TcpListener, echo: Echo) -> None:
    door = TcpDoor("localhost", listener.port, "another secret", name="stranger")
    door.serve(echo.answer)
    until(lambda: door.problem)
    until(lambda: listener.problem)
    with pytest.raises(TransportError, match=r"0 of 1 engines dialled .*; stranger dialled and its token was refused") as caught:
        listener.accept(1, timeout=0.2)
    assert "port and token" in str(caught.value)
    assert "the token was refused" in str(door.problem)
    door.close()


def test_a_listener_with_another_token_gets_nothing_of_the_token(echo: Echo) -> None:
    """Whoever took the trainer's port sees random bytes and a hash of them."""
    with socket.create_server(("localhost", 0)) as false_trainer:
        door = TcpDoor("localhost", false_trainer.getsockname()[1], TOKEN)
        door.serve(echo.answer)
        peer, _ = false_trainer.accept()
        with peer:
            peer.settimeout(20)
            seen = peer.recv(4096)
            message = encode({"nonce": b"n" * 32, "proof": b"p" * 32})
            peer.sendall(len(message).to_bytes(4, "big") + message)
            refusal = encode({"proof": b""})
            assert peer.recv(4096) == len(refusal).to_bytes(4, "big") + refusal
            assert peer.recv(4096) == b""
        assert TOKEN.encode() not in seen
        until(lambda: door.problem)
        door.close()
    assert "the token was refused" in str(door.problem)
    assert echo.asked == []


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1",
        bytes(4),
        (1 << 20).to_bytes(4, "big"),
    ],
    ids=repr,
)
def test_strangers_are_dropped_and_engines_still_get_in(listener: TcpListener, echo: Echo, sent: bytes) -> None:
    with socket.create_connection(("localhost", listener.port)) as stranger:
        stranger.sendall(sent)
        door = TcpDoor("localhost", listener.port, TOKEN)
        door.serve(echo.answer)
        (rpc,) = listener.accept(1, timeout=20)
        assert call(rpc) == b"hello"
        door.close()


def test_a_proof_cannot_be_used_again(listener: TcpListener, echo: Echo) -> None:
    """A recorded conversation is worth nothing: the listener's bytes are new each time."""
    recorded: list[bytes] = []

    def relay(middle: socket.socket) -> None:
        one, _ = middle.accept()
        two = socket.create_connection(("localhost", listener.port))
        for source, target, keep in ((one, two, True), (two, one, False), (one, two, True)):
            data = source.recv(4096)
            recorded.extend([data] * keep)
            target.sendall(data)
        one.close()
        two.close()

    with socket.create_server(("localhost", 0)) as middle:
        thread = threading.Thread(target=relay, args=(middle,))
        thread.start()
        door = TcpDoor("localhost", middle.getsockname()[1], TOKEN)
        door.serve(echo.answer)
        thread.join(20)
        door.close()
    listener.arrived.get(timeout=20)  # the first time it was an engine
    with socket.create_connection(("localhost", listener.port), timeout=20) as again:
        again.sendall(recorded[0])
        again.recv(4096)
        again.sendall(recorded[1])
        assert again.recv(4096) == b""
    assert "its token was refused" in str(listener.problem)


def test_one_that_says_nothing_is_dropped(listener: TcpListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engine.remote.tcp.HANDSHAKE", 0.1)
    with socket.create_connection(("localhost", listener.port), timeout=20) as silent:
        assert silent.recv(1) == b""
    assert "no engine" in str(listener.problem)


def test_a_frame_beyond_the_limit_ends_the_connection(listener: TcpListener, door: TcpDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    (rpc,) = listener.accept(1, timeout=20)
    monkeypatch.setattr("instep.engine.remote.tcp.LARGE", 1 << 16)
    call(rpc)  # the read that was waiting had the old limit
    with pytest.raises(EngineLost, match="engine"):
        call(rpc, bytes(1 << 16))
    (rpc,) = listener.accept(1, timeout=20)
    assert call(rpc) == b"hello"


def test_a_call_fails_when_the_engine_goes(listener: TcpListener, door: TcpDoor, echo: Echo) -> None:
    (rpc,) = listener.accept(1, timeout=20)

    async def main() -> None:
        hanging = asyncio.create_task(rpc.call("hang", b""))
        while "hang" not in echo.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.to_thread(door.close)
        with pytest.raises(EngineLost, match="engine closed the connection"):
            await asyncio.wait_for(hanging, 20)

    asyncio.run(main())
    with pytest.raises(EngineLost, match="engine closed the connection"):
        call(rpc)


def test_a_call_fails_when_the_trainer_itself_closes(listener: TcpListener, door: TcpDoor, echo: Echo) -> None:
    (rpc,) = listener.accept(1, timeout=20)

    async def main() -> None:
        hanging = asyncio.create_task(rpc.call("hang", b""))
        while "hang" not in echo.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.gather(*(asyncio.to_thread(listener.close) for _ in range(3)))
        with pytest.raises(EngineLost, match="the connection was closed here"):
            await asyncio.wait_for(hanging, 20)

    asyncio.run(main())


def test_an_engine_is_told_when_the_trainer_goes_and_dials_its_successor(echo: Echo) -> None:
    first = TcpListener("localhost", 0, TOKEN)
    door = TcpDoor("localhost", first.port, TOKEN)
    door.serve(echo.answer)
    assert call(first.accept(1, timeout=20)[0]) == b"hello"
    first.close()
    until(lambda: GONE in echo.asked)
    second = TcpListener("localhost", first.port, TOKEN)
    assert call(second.accept(1, timeout=20)[0]) == b"hello"
    door.close()
    second.close()


def test_engines_that_left_again_do_not_count(listener: TcpListener, echo: Echo) -> None:
    door = TcpDoor("localhost", listener.port, TOKEN)
    door.serve(echo.answer)
    rpc = listener.arrived.get(timeout=20)
    door.close()
    until(lambda: rpc.requests.lost)
    listener.arrived.put(rpc)
    with pytest.raises(TransportError, match="0 of 1"):
        listener.accept(1, timeout=0.2)


def test_a_port_that_is_taken(listener: TcpListener) -> None:
    with pytest.raises(TransportError, match=f"cannot listen at localhost port {listener.port}"):
        TcpListener("localhost", listener.port, TOKEN)
    with pytest.raises(TransportError, match=r"cannot listen at 192\.0\.2\.1"):
        TcpListener("192.0.2.1", 0, TOKEN)


def test_closing_twice_and_calling_afterwards(listener: TcpListener, door: TcpDoor) -> None:
    (rpc,) = listener.accept(1, timeout=20)
    for _ in range(2):
        listener.close()
        door.close()
    with pytest.raises(EngineLost):
        call(rpc)


def test_threads_and_sockets_end_with_their_owner(echo: Echo) -> None:
    before = set(threading.enumerate())  # other tests' threads may end meanwhile
    for _ in range(5):
        listener = TcpListener("localhost", 0, TOKEN)
        door = TcpDoor("localhost", listener.port, TOKEN)
        door.serve(echo.answer)
        listener.accept(1, timeout=20)
        door.close()
        listener.close()
    until(lambda: set(threading.enumerate()) <= before)


def test_a_hello_is_small() -> None:
    assert len(encode(Hello("host.example.org:1234567", bytes(32)))) < 1 << 10
