"""An `Rpc` and a `Door` over the two ends of a `multiprocessing.Pipe`, one for each engine.

Messages are msgpack: a pipe pickles nothing here. Reading and answering run on an event loop in a
thread of their own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from weakref import WeakKeyDictionary

import msgspec

from instep.engine.remote.frames import Frame, Requests, Running
from instep.engine.remote.loop_thread import LoopThread
from instep.engine.remote.rpc import GONE, Answer
from instep.errors import ConfigError, EngineLost
from instep.protocol import decode, encode

SILENT = "nothing has come through its pipe"
STRANGE = "its pipe carries something else: a pipe for weights must carry nothing else"
CLOSED = "closed its end of the pipe"


def checked(pipe: Connection) -> Connection:
    """Raises `ConfigError` for an end that cannot both read and write."""
    if pipe.closed or not (pipe.readable and pipe.writable):
        raise ConfigError(
            "this end of a pipe cannot both read and write",
            next_step="give an open end of multiprocessing.Pipe()",
        )
    return pipe


class End:
    """One end of a pipe: whole frames, in both directions at once.

    take: called with this object for each frame. gone: called once, with the reason why no more
    come.

    An end has one reader: a new `End` of the same pipe closes the one before.
    """

    def __init__(self, pipe: Connection, take: Callable[[End, Frame], None], gone: Callable[[str], None]) -> None:
        self.pipe, self.take, self.gone = pipe, take, gone
        self.loop, self.sending, self.closed = LoopThread("instep-pipe"), threading.Lock(), False
        if former := _readers.pop(pipe, None):
            former.close()
        _readers[pipe] = self
        loop = self.loop.loop
        loop.call_soon_threadsafe(loop.add_reader, pipe.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            frame = decode(self.pipe.recv_bytes(), Frame)
        except (OSError, EOFError):
            self._end(CLOSED)
        except msgspec.DecodeError:
            self._end(STRANGE)
        else:
            self.take(self, frame)

    def _end(self, why: str) -> None:
        self.loop.loop.remove_reader(self.pipe.fileno())
        self.gone(why)

    async def send(self, frame: Frame) -> None:
        """Sends a frame from another thread, so that a full pipe does not block the loop. Raises
        `OSError` if the other end is closed."""
        await asyncio.to_thread(self._send, encode(frame))

    def _send(self, data: bytes) -> None:
        with self.sending:
            self.pipe.send_bytes(data)

    def close(self) -> None:
        """Stops reading. The pipe itself stays open."""
        self.closed = True
        self.loop.close()


_readers: WeakKeyDictionary[Connection, End] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_readers.clear)  # their threads are not in a child


class PipeRpc:
    """The trainer's side of a pipe. name: of the engine, in errors and receipts."""

    def __init__(self, pipe: Connection, name: str = "pipe") -> None:
        self.pipe, self.name = checked(pipe), name
        self.end: End | None = None
        self.opening = threading.Lock()
        self.requests = Requests()

    async def call(self, method: str, payload: bytes) -> bytes:
        self.requests.check()
        with self.opening:
            if self.end is None or self.end.closed:
                self.end = End(self.pipe, self._answered, self._ended)
            end = self.end
        try:
            return await asyncio.wrap_future(end.loop.run(self._call(end, method, payload)))
        except asyncio.CancelledError:
            if end.closed:  # not by the caller
                raise EngineLost(f"{self.name}: the pipe is not read here any more") from None
            raise

    async def _call(self, end: End, method: str, payload: bytes) -> bytes:
        with self.requests.asking(method, payload) as (frame, answer):
            try:
                await end.send(frame)
            except OSError as error:
                raise EngineLost(f"{self.name} {CLOSED}") from error
            return await answer

    def _answered(self, _: End, frame: Frame) -> None:
        self.requests.answered(frame)

    def _ended(self, why: str) -> None:
        self.requests.lose(f"{self.name} {why}" if why == CLOSED else f"{self.name}: {why}")


class PipeDoor:
    """The engine's side of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = checked(pipe)
        self.problem: str | None = SILENT
        self.end: End | None = None
        self.running = Running()

    def serve(self, answer: Answer) -> None:
        if self.end is None or self.end.closed:
            self.end = End(
                self.pipe,
                lambda end, frame: self.running.start(self._reply(end, frame, answer)),
                lambda why: self._gone(why, answer),
            )

    def close(self) -> None:
        if self.end is not None:
            self.end.close()

    async def _reply(self, end: End, frame: Frame, answer: Answer) -> None:
        self.problem = None
        payload = await answer(frame.method, frame.payload)
        with suppress(OSError):  # the reader sees it too
            await end.send(Frame(frame.number, "", payload))

    def _gone(self, why: str, answer: Answer) -> None:
        self.problem = f"the trainer {why}" if why == CLOSED else why
        self.running.start(answer(GONE, b""))
