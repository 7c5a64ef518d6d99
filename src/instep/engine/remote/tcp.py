"""An `Rpc` over TCP. The engine's process dials the trainer and answers requests over that
connection.

    trainer                          engine's process
    TcpListener(host, port, token)
                       ◀─ Hello ──   TcpDoor(host, port, token).serve(answer)
                       ─ Welcome ─▶  proves that it knows the token
                       ◀─ Proof ──   proves it too
    TcpRpc.call        ── Frame ──▶  answer(method, payload)
                       ◀─ Frame ──

The token itself is never sent: each side sends a keyed hash of both sides' random bytes. What
follows is not encrypted, so listen on other interfaces than the loopback in a trusted network only.
A frame is four bytes of length and a msgpack struct; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import queue
import secrets
import socket
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, TypeVar

import msgspec

from instep.engine.remote.frames import Frame, Requests, Running
from instep.engine.remote.loop_thread import LoopThread
from instep.engine.remote.rpc import GONE, Answer
from instep.errors import EngineLost, InstepError, TransportError
from instep.protocol import decode, encode

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HANDSHAKE = 10.0  # seconds
SMALL, LARGE = 1 << 10, 1 << 28  # bytes of a frame, before and after a peer has proved that it knows the token
AGAIN = 0.1  # seconds between two attempts to dial
NOT_THERE = "start the engines with this address, port and token, at the same time"


class Hello(msgspec.Struct, frozen=True):
    name: str
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True):
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True):
    proof: bytes


class TcpListener:
    """The trainer's side. host: an interface of this machine. port: 0 for a free one, which
    `port` then holds."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.token = token.encode()
        self.problem: str | None = None
        self.loop = LoopThread("instep-tcp-listener")
        self.arrived: queue.SimpleQueue[TcpRpc] = queue.SimpleQueue()
        self.engines: list[TcpRpc] = []
        try:
            self.server = self.loop.run(asyncio.start_server(self._welcome, host, port)).result(HANDSHAKE)
        except OSError as error:
            self.loop.close()
            raise TransportError(f"cannot listen at {host} port {port}: {error}", next_step="choose another port or address") from error
        self.port: int = self.server.sockets[0].getsockname()[1]

    def accept(self, count: int, timeout: float) -> list[TcpRpc]:
        """Returns the next engines that have dialled with the right token and are still connected.

        Raises `TransportError` where fewer come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        found: list[TcpRpc] = []
        while len(found := [rpc for rpc in found if rpc.requests.lost is None]) < count:
            try:
                found.append(self.arrived.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                text = f"{len(found)} of {count} engines dialled port {self.port} within {timeout:g} s"
                text += f"; {self.problem}" if self.problem else ""
                raise TransportError(text, next_step=NOT_THERE) from None
        return found

    def close(self) -> None:
        """Ends every connection. May be called twice."""
        for rpc in self.engines:
            rpc.requests.lost = rpc.requests.lost or f"{rpc.name}: the connection was closed here"
        self.loop.close(self.server)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.CancelledError):  # by `close`; Python 3.11 would print it
            try:
                async with asyncio.timeout(HANDSHAKE):
                    hello, nonce = await receive(reader, Hello, SMALL), secrets.token_bytes(32)
                    await send(writer, Welcome(nonce, proof(self.token, "trainer", hello, nonce)))
                    answer = await receive(reader, Proof, SMALL)
                if not hmac.compare_digest(answer.proof, proof(self.token, "engine", hello, nonce)):
                    text = f"{hello.name} dialled and its token was refused: it is another one"
                    raise TransportError(text)
            except Exception as error:
                self.problem = error.args[0] if isinstance(error, TransportError) else f"a peer that dialled is no engine: {error!r}"
                return
            rpc = TcpRpc(hello.name, (reader, writer), self.loop)
            self.engines.append(rpc)
            self.arrived.put(rpc)
            await rpc.read()


class TcpRpc:
    """The trainer's side of a connection to one engine."""

    def __init__(self, name: str, streams: Streams, loop: LoopThread) -> None:
        self.name = name
        self.reader, self.writer = streams
        self.loop = loop
        self.requests = Requests()

    async def call(self, method: str, payload: bytes) -> bytes:
        self.requests.check()  # its loop may be closed
        try:
            return await asyncio.wrap_future(self.loop.run(self._call(method, payload)))
        except OSError as error:
            raise EngineLost(f"{self.name} cannot be reached: {error}") from error
        except asyncio.CancelledError:
            self.requests.check()  # by `close`, not by the caller
            raise

    async def _call(self, method: str, payload: bytes) -> bytes:
        with self.requests.asking(method, payload) as (frame, answer):
            await send(self.writer, frame)
            return await answer

    async def read(self) -> None:
        """Receives answers until the connection ends."""
        reason = "closed the connection"
        try:
            while True:
                self.requests.answered(await receive(self.reader, Frame, LARGE))
        except (msgspec.DecodeError, TransportError) as error:
            reason = f"sent no frame: {error.args[0]}"
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.requests.lose(f"{self.name} {reason}")


class TcpDoor:
    """The engine's side. Dials until a trainer answers, and again whenever the connection has
    ended."""

    def __init__(self, host: str, port: int, token: str, name: str | None = None) -> None:
        self.host, self.port, self.token = host, port, token.encode()
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.problem: str | None = None
        self.loop: LoopThread | None = None
        self.serving: Future[None] | None = None  # loops hold their tasks weakly
        self.running = Running()

    def serve(self, answer: Answer) -> None:
        if self.loop is None:
            self.loop = LoopThread("instep-tcp-door")
            self.serving = self.loop.run(self._serve(answer))

    def close(self) -> None:
        if self.loop is not None:
            self.loop.close()
            self.loop = None

    async def _serve(self, answer: Answer) -> None:
        while True:
            try:
                async with asyncio.timeout(HANDSHAKE):
                    streams = await self._dial()
            except (OSError, msgspec.DecodeError, asyncio.IncompleteReadError, InstepError) as error:
                text = error.args[0] if isinstance(error, InstepError) else f"{type(error).__name__}: {error}"
                self.problem = f"{self.host} port {self.port}: {text}"
            else:
                self.problem = None
                await self._converse(streams, answer)
            await asyncio.sleep(AGAIN)

    async def _dial(self) -> Streams:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            hello = Hello(self.name, secrets.token_bytes(32))
            await send(writer, hello)
            welcome = await receive(reader, Welcome, SMALL)
            if not hmac.compare_digest(welcome.proof, proof(self.token, "trainer", hello, welcome.nonce)):
                await send(writer, Proof(b""))  # the other side shall know why nothing follows
                raise TransportError("the token was refused: whoever listens there has another one")
            await send(writer, Proof(proof(self.token, "engine", hello, welcome.nonce)))
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _converse(self, streams: Streams, answer: Answer) -> None:
        reader, writer = streams
        try:
            while True:
                frame = await receive(reader, Frame, LARGE)
                self.running.start(self._reply(frame, writer, answer))
        except (OSError, msgspec.DecodeError, asyncio.IncompleteReadError, TransportError):
            self.problem = f"{self.host} port {self.port}: the connection ended"
        finally:
            writer.close()
            await answer(GONE, b"")

    async def _reply(self, frame: Frame, writer: asyncio.StreamWriter, answer: Answer) -> None:
        payload = await answer(frame.method, frame.payload)
        with suppress(OSError):  # `_converse` sees it too
            await send(writer, Frame(frame.number, "", payload))


def proof(token: bytes, side: str, hello: Hello, nonce: bytes) -> bytes:
    return hmac.digest(token, encode((side, hello.name, hello.nonce, nonce)), "sha256")


async def send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, kind: type[T], limit: int) -> T:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > limit:
        raise TransportError(f"a frame of {size} bytes, at most {limit} are taken")
    return decode(await reader.readexactly(size), kind)
