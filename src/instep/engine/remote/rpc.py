"""Engines in other processes, over any remote procedure call.

    trainer                                     the engine's process
    RemoteEngine(rpc)  ── method, payload ───▶  Endpoint(engine).answer(method, payload)
                       ◀─ encoded Outcome ───

This is the control layer alone: requests of some kilobytes. Weights do not travel here, workers
pull them from instep's transports. `tcp.py` and `ray.py` each have an `Rpc`; another one is a class
with one method, and whatever awaits `answer` on the other side.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from instep.engine import CachePolicy, Engine
from instep.engine.known import LATE
from instep.engine.member import Member
from instep.engine.remote.asked import AskedEngine
from instep.engine.turns import Turns
from instep.errors import ConfigError, EngineLost, EngineTimeout
from instep.faults import error_of, fault_of
from instep.protocol import Fault, Method, Reply, Request, decode, encode, raw

T = TypeVar("T")
Answer = Callable[[str, bytes], Coroutine[Any, Any, bytes]]
GONE = "gone"
"""The method that an `Rpc` may bring when it sees that the trainer is gone; it has no payload."""
LATE_THERE = "TimeoutError"
"""The fault of a request that the other side waited for as long as the trainer does."""

logger = logging.getLogger("instep")


@runtime_checkable
class Rpc(Protocol):
    """The trainer's way to one engine's process."""

    name: str

    async def call(self, method: str, payload: bytes) -> bytes:
        """Returns what `answer(method, payload)` returned on the other side. The caller keeps
        the deadline, and may cancel.

        Raises `EngineLost` where nobody answers any more.
        """


class Door(Protocol):
    """The engine's side of an `Rpc`, where that side has to do something to be found."""

    problem: str | None
    """Why nothing comes in, while nothing does."""

    def serve(self, answer: Answer) -> None:
        """Awaits `answer` for every request from now on. Returns at once."""

    def close(self) -> None: ...


class LocalRpc:
    """An `Rpc` with both sides in one process."""

    def __init__(self, answer: Answer, name: str = "local") -> None:
        self.answer = answer
        self.name = name

    async def call(self, method: str, payload: bytes) -> bytes:
        return await self.answer(method, payload)


class Outcome(msgspec.Struct, frozen=True):
    """The result or the fault of one request."""

    fault: Fault | None = None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


async def outcome(action: Awaitable[Any]) -> bytes:
    """Returns the encoded result or error of `action`. Never raises."""
    try:
        return encode(Outcome(body=raw(await action)))
    except TimeoutError:
        return encode(Outcome(Fault(LATE_THERE, "")))
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> bytes:
    """Returns an encoded error."""
    return encode(Outcome(fault_of(error, otherwise="EngineLost")))


class RemoteEngine(AskedEngine):
    """The engine behind an `Rpc`."""

    def __init__(self, rpc: Rpc) -> None:
        self.rpc = rpc
        self.name = rpc.name

    async def ask(self, kind: type[T], method: str, *args: Any) -> T:
        """Raises the other side's error, `TimeoutError` if that side gave up waiting, and
        `EngineLost` for an answer that is not well formed."""
        answer = await self.rpc.call(method, encode(args))
        try:
            found = decode(answer, Outcome)
            if found.fault is None:
                return decode(found.body, kind)
        except msgspec.DecodeError as error:
            raise EngineLost(f"{self.name} sent no valid answer to {method}: {error}") from error
        if found.fault.kind == LATE_THERE:
            raise TimeoutError
        raise error_of(found.fault, f"{self.name}: ")


ARGUMENTS: dict[str, Any] = {
    "call": tuple[Method, bytes],
    "pause": tuple[CachePolicy],
    "resume": tuple[()],
    "label": tuple[str],
    "score": tuple[list[int]],
    "refuse": tuple[str | None],
}


class Endpoint:
    """Serves an engine to trainers in other processes.

    timeout: the trainer's, in seconds. A request that takes longer is given up. An engine that is
        left alone for that long in the middle of a push is taken back: where it is paused it goes
        on with whatever whole version it holds, or refuses to generate if it holds none. Other
        trainers may push then.

    A trainer that has prepared a version is the one whose silence counts, until it ends its push or
    goes away. Another one, which the workers refuse meanwhile, changes nothing here.
    """

    def __init__(self, engine: Engine, timeout: float = 60.0) -> None:
        self.engine, self.timeout = engine, timeout
        self.version: str | None = None
        """The last one that a trainer brought."""
        self.brought: str | None = None  # until it goes on with it
        self.session: str | None = None  # of the trainer whose version a worker has prepared
        self.paused = self.deserted = False
        self.refusal: str | None = None
        """Why the engine must not generate."""
        self.running = 0
        self.lock = threading.Lock()  # requests may come on several event loops
        self.turns = Turns()
        self.timer: threading.Timer | None = None

    async def answer(self, method: str, payload: bytes, seconds: float | None = None) -> bytes:
        """Runs one request. Never raises. seconds: the request's deadline. If a worker prepares
        a version for it, the whole push gets this deadline."""
        if self._strange(method, payload):
            return await outcome(self._run(method, payload, seconds))
        with self.lock:
            self.running += 1
            self.deserted = method == GONE
            self._watch()
        try:
            return await outcome(self._run(method, payload, seconds))
        finally:
            with self.lock:
                self.running -= 1
                self._watch()

    def _strange(self, method: str, payload: bytes) -> bool:
        """Whether another trainer asks than the one that pushes, whose life this request does
        not show."""
        if self.session is None or method != "call":
            return False
        try:
            return decode(decode(payload, ARGUMENTS["call"])[1], Request).session != self.session
        except (msgspec.DecodeError, RecursionError):
            return True

    async def _run(self, method: str, payload: bytes, seconds: float | None) -> Any:
        if method == GONE:
            return None
        if method not in ARGUMENTS:
            raise ConfigError(f"unknown method {method!r}")
        args = msgspec.msgpack.decode(payload, type=ARGUMENTS[method])
        step = args[0] if method == "call" else method
        if step == "refuse" and args[0] is not None:
            self.refusal = args[0]  # also where that fails
        try:
            async with asyncio.timeout(seconds or self.timeout), self._in_turn(step, args):
                result = await getattr(self.engine, method)(*args)
                await self._done(step, args, result, seconds)
        except (TimeoutError, EngineLost):
            if step == "prepare":
                self.session = self.session or decode(args[1], Request).session  # for all that is known
            raise
        return result

    @asynccontextmanager
    async def _in_turn(self, step: str, args: Any) -> AsyncIterator[None]:
        if step == "commit":
            async with self.turns.commit(decode(args[1], Request).session, self._check_paused):
                yield
        elif step in ("pause", "label", "resume"):
            async with self.turns.change(beside_commit=step == "pause"):
                # Also where the pause comes late or fails: to resume once too often does no harm.
                self.paused = self.paused or step == "pause"
                yield
        else:
            yield

    def _check_paused(self) -> None:
        if not self.paused:
            raise EngineTimeout(f"it was left paused for more than {self.timeout:g} s in the middle of a push, and went on without it")

    async def _done(self, step: str, args: Any, result: Any, seconds: float | None) -> None:
        """Notes what a request has changed."""
        session = decode(args[1], Request).session if step in ("prepare", "abort") else None
        if step == "prepare" and any(decode(answer, Reply).fault is None for answer in result):
            self.session, self.timeout = session, seconds or self.timeout
        elif step == "abort":
            self.turns.call_off(session or "")
            if session == self.session:
                self.session, self.deserted = None, self.paused  # a trainer that ends its push here leaves the engine as it is
        elif step == "label":
            self.brought = args[0]
        elif step == "resume":
            self.paused, self.version = False, self.brought
            await self._let_go()
        elif step == "refuse":
            self.refusal = args[0]

    async def _let_go(self) -> None:
        """Ends the lease when the push is over, as its trainer may not live to end it."""
        if self.session is not None:
            member, self.session = Member(self.engine, self.session, self.timeout), None
            await _forget(member)

    def _watch(self) -> None:
        """Starts the timer of a silent trainer, or stops it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        left = self.paused or self.session is not None
        if left and not self.running:
            self.timer = threading.Timer(0 if self.deserted else self.timeout, self._take_back)
            self.timer.daemon = True
            self.timer.start()

    def _take_back(self) -> None:
        with self.lock:
            if self.running:
                return
            member = Member(self.engine, self.session or "", self.timeout, condemned=LATE)
            paused, self.paused, self.session = self.paused and self.refusal is None, False, None
        with self.turns.lock:
            asyncio.run(self._go_on(member) if paused else _forget(member))

    async def _go_on(self, member: Member) -> None:
        reason = "its trainer went away in the middle of a push"
        try:
            await member.hello()  # one whole version: it is labelled, and the engine goes on
        except Exception as error:
            reason = f"{reason}: {error}"
        else:
            if member.serving == "old":
                self.version = member.version
                logger.warning("%s: %s; it goes on with %s", self.engine.name, reason, member.version or "its own first weights")
                return
        self.refusal = reason
        await member.condemn(reason)


async def _forget(member: Member) -> None:
    """Aborts what the trainer has prepared, which would keep others away until its lease ends."""
    with suppress(Exception):
        await member.abort()
