"""An `Rpc` and a `Door` over the two ends of a `multiprocessing.Pipe`, one for each engine.

Messages are msgpack: a pipe pickles nothing here. Reading and answering run on an event loop in a
    thread of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from instep.engine.remote.loop_thread import LoopThread
from instep.engine.remote.rpc import GONE, Answer
from instep.engine.remote.tcp import Frame
from instep.errors import ConfigError, EngineLost
from instep.protocol import decode, encode

SILENT = "nothing has come through its pipe"
STRANGE = "its pipe carries something else than requests and answers: a pipe for weights must carry nothing else"


def checked(pipe: Connection) -> Connection:
    """Raises `ConfigError` for an end that cannot both read and write."""
    if pipe.closed or not (pipe.readable and pipe.writable):
        raise ConfigError(
            "this end of a pipe cannot both read and write",
            next_step="give an open end of multiprocessing.Pipe()",
        )
    return pipe


class End:
    """One end of a pipe: whole frames, in both directions at once."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self.pipe, self.loop, self.sending = pipe, LoopThread(name), threading.Lock()

    def read(self, take: Callable[[Frame], None], end: Callable[[str], None]) -> None:
        """Calls `take` for each frame from now on, and `end` once with the reason why no more
        come."""
        self.loop.loop.call_soon_threadsafe(self.loop.loop.add_reader, self.pipe.fileno(), self._readable, take, end)

    def _readable(self, take: Callable[[Frame], None], end: Callable[[str], None]) -> None:
        try:
            frame = decode(self.pipe.recv_bytes(), Frame)
        except (OSError, EOFError) as error:
            self._end(end, f"closed its end of the pipe: {type(error).__name__}")
        except msgspec.DecodeError:
            self._end(end, STRANGE)
        else:
            take(frame)

    def _end(self, end: Callable[[str], None], why: str) -> None:
        self.loop.loop.remove_reader(self.pipe.fileno())
        end(why)

    async def send(self, frame: Frame) -> None:
        """Raises `OSError` where nobody reads any more. A full pipe keeps a thread waiting, and not
        the loop."""
        await asyncio.to_thread(self._send, encode(frame))

    def _send(self, data: bytes) -> None:
        with self.sending:
            self.pipe.send_bytes(data)

    def close(self) -> None:
        """Reads no more. The pipe itself is its owner's."""
        self.loop.close()


class PipeRpc:
    """The trainer's side. name: what errors and receipts call the engine."""

    def __init__(self, pipe: Connection, name: str = "pipe") -> None:
        self.name = name
        self.end = End(checked(pipe), "instep-pipe-rpc")
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.lost: str | None = None
        self.end.read(self._answered, self._ended)

    async def call(self, method: str, payload: bytes) -> bytes:
        return await asyncio.wrap_future(self.end.loop.run(self._call(method, payload)))

    async def _call(self, method: str, payload: bytes) -> bytes:
        if self.lost:
            raise EngineLost(self.lost)
        number = next(self.numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        try:
            await self.end.send(Frame(number, method, payload))
            return await answer
        except OSError as error:
            raise EngineLost(f"{self.name} closed its end of the pipe: {type(error).__name__}") from error
        finally:
            del self.waiting[number]

    def _answered(self, frame: Frame) -> None:
        if frame.number in self.waiting and not (answer := self.waiting[frame.number]).done():
            answer.set_result(frame.payload)

    def _ended(self, why: str) -> None:
        self.lost = f"{self.name} {why}"
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(EngineLost(self.lost))


class PipeDoor:
    """The engine's side."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = checked(pipe)
        self.problem: str | None = SILENT
        self.end: End | None = None
        self.running: set[asyncio.Task[Any]] = set()  # loops hold their tasks weakly

    def serve(self, answer: Answer) -> None:
        if self.end is None:
            self.end = End(self.pipe, "instep-pipe-door")
            self.end.read(
                lambda frame: self._start(self._reply(frame, answer)),
                lambda why: self._gone(why, answer),
            )

    def close(self) -> None:
        if self.end is not None:
            self.end.close()
            self.end = None

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _reply(self, frame: Frame, answer: Answer) -> None:
        self.problem, end = None, self.end
        payload = await answer(frame.method, frame.payload)
        with suppress(OSError):  # the reader sees it too
            if end is not None:
                await end.send(Frame(frame.number, "", payload))

    def _gone(self, why: str, answer: Answer) -> None:
        self.problem = f"the trainer {why}" if why != STRANGE else STRANGE
        self._start(answer(GONE, b""))
