"""The story of a push. Read this first, then `steps.py`, then the folder that the step uses.

`plan` and `source` describe, `transport` publishes, `engine` and `receiver` prepare and commit.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from instep.attempt import Attempt, Done, Ready
from instep.config import Caches, Config, Require, TransportName, check_version
from instep.engine.fleet import Fleet
from instep.engine.member import Member
from instep.errors import ConfigError, EngineState, InstepError, TransportError, VersionConflict
from instep.forked import Own
from instep.ranks.follow import Follower
from instep.ranks.roles import Lead, role
from instep.receipt import Receipt
from instep.session import Sent, Session
from instep.shielded import to_the_end
from instep.source.adapter import adapter_of
from instep.source.guarded import Guarded
from instep.source.pairs import Pair, drained
from instep.steps import Push
from instep.telemetry import Event, Sink, log

T = TypeVar("T")


class WeightSync:
    """Keeps engines in step with a trainer.

        sync = WeightSync(source=model, engines=[llm])
        for step in range(steps):
            train(model)
            receipt = sync.push(version=f"step-{step}")  # all serve it, or an error says which

    Invariant: an engine serves one whole version, and its label is changed only after its bytes
    were proved to be the trainer's. The trainer may change its weights when the push returns.

    source: an `nn.Module`, a mapping of names to tensors, a directory of safetensors files, an
    `Adapter`, or a `Source`.
    engines: a list of `vllm.LLM`, `AsyncLLM`, servers' URLs, handles of Ray actors,
    `TransformersEngine`, `MemoryEngine`, or any `Engine`.
    sinks: functions that take one `Event` at a time (see `instep.telemetry`).

    The other settings are those of `instep.config.Config`. Raises `ConfigError` for wrong ones.

    Where the source lies in several processes (FSDP, ZeRO, DTensor), every rank makes a
    `WeightSync` and makes the same calls. Rank 0 has the engines; those of other ranks are not
    looked at. Every rank returns the same receipt or raises the same error.
    """

    def __init__(
        self,
        source: Any,
        engines: Sequence[Any],
        *,
        require: Require = "all",
        caches: Caches = "reset",
        transport: TransportName = "auto",
        cast: bool = False,
        timeout: float = 60.0,
        canary: Sequence[int] | None = None,
        canary_bound: float = 1.0,
        gather_whole_model: bool = False,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._own = Own()
        config = Config(require, caches, transport, cast, timeout, canary, canary_bound, gather_whole_model)
        check_engines(engines)
        self._role = role(source, config, engines=bool(engines))
        if isinstance(self._role, Lead):
            fleet = Fleet(engines, uuid.uuid4().hex, timeout, adapter_of(self._role.source))
            self._session = Session(config, Guarded(self._role.source), fleet, self._role.transport, (log, *sinks))
        self._closed = False
        self._busy = threading.Lock()  # a push is running
        self._asking = threading.Lock()  # somebody talks to the engines

    def push(self, version: str, *, base: str | None = None, pairs: Iterable[Pair] | None = None) -> Receipt:
        """Brings every engine to the source's weights of this moment and labels them `version`.

        base: refuse unless every engine serves this version now.
        pairs: (name, tensor) pairs, for a `PairSource`. They are read to the end also where the
        push fails, on every rank.

        Raises `ConfigError`, `PlanError`, `VersionConflict`, `SourceError`, `TransportError`: every
        engine still serves what it served.
        Raises `SyncError` or a subclass: `.engines` says what each engine serves now.
        """
        with drained(pairs) as given:
            return _run(self._push(version, base, given, begun=given is None and self._begin()))

    async def apush(self, version: str, *, base: str | None = None, pairs: Iterable[Pair] | None = None) -> Receipt:
        """Does what `push` does, for asyncio. The weights must not change before it returns.

        Cancelled, it takes up to ten seconds more (or `timeout`, where that is less): no engine is
        left paused, each goes on with one whole version or refuses.
        """
        with drained(pairs) as given:
            return await self._push(version, base, given, begun=False)

    def _begin(self) -> bool:
        """Tells the transport that a push begins: a GPU sums up the weights while the event loop is
        made, which takes a third of a ms. Returns whether the transport was told."""
        if not isinstance(self._role, Lead) or not self._own.here() or not self._busy.acquire(blocking=False):
            return False
        try:
            if not self._closed:
                self._session.transport.prefetch()
            return not self._closed
        finally:
            self._busy.release()

    async def _push(self, version: str, base: str | None, pairs: Iterator[Pair] | None, *, begun: bool) -> Receipt:
        check_version(version)
        self._own.check("WeightSync")
        if isinstance(self._role, Follower):
            deque(pairs or (), maxlen=0)  # rank 0 gathers each tensor together with this one
            return await self._follow(self._role, "push", version)
        async with self._alone(), self._pushing("push", version) as push:
            with self._session.source.fed(pairs):
                found = push.describe(begun=begun)
                return await self._bring(push, push.trust(found) or await push.ask(), base=base)

    def catch_up(self, engine: Any = None) -> Receipt:
        """Brings the current version to engines that do not serve it: restarted ones, and those
        that a push did not reach.

        engine: a new engine, in this and every later push. It takes the place and the name of one
        that has died.
        Raises `VersionConflict` where no version is held: nothing was pushed yet, the last push
        reached no engine, or its bytes were the trainer's own and the trainer has stepped. Raises
        `ConfigError` for an engine that is listed already, unless it has died.
        """
        return _run(self.acatch_up(engine))

    async def acatch_up(self, engine: Any = None) -> Receipt:
        """Does what `catch_up` does, for asyncio."""
        self._own.check("WeightSync")
        if isinstance(self._role, Follower):
            return await self._follow(self._role, "catch_up", "")
        async with self._alone():
            if engine is not None:
                await self._session.fleet.take_in(engine)
            current = self._session.to_be_had()
            async with self._pushing("catch_up", current.manifest.version if current else "") as push:
                if current is None:
                    raise VersionConflict("there is no current version to catch up with", next_step="push one: it reaches new engines too")
                asked = await push.ask(silent=True)
                behind = [member for member in asked.members if member.behind(push.version)]
                if not behind:
                    return await push.receipt(Done({}), current)
                return await self._bring(push, replace(asked, members=behind), again=current.for_those_behind())

    async def _bring(self, push: Push, attempt: Attempt, *, base: str | None = None, again: Sent | None = None) -> Receipt:
        """Makes one attempt after another until engines serve the version. Each assumes less:

            trusted (also fused)  an engine is not as the last push left it   ──▶ asked
            any of them           an engine cannot open what was published    ──▶ another transport

        again: the earlier publication, for a catch-up. It is published once more if its bytes were
        the trainer's own, or if engines cannot open it as it is; the new publication must then have
        the same digests.
        """
        sent = again if again and not again.manifest.location.live else None
        tensors = again.manifest.tensors if again else self._session.described
        while True:
            attempt, described = await push.plan(attempt, tensors, keep_dtypes=again is not None)
            sent = sent or push.publish(attempt, described, base, again.known if again else None)
            step = push.fuse(attempt, sent) or await push.prepare(attempt, sent)
            end = await push.commit(step, sent) if isinstance(step, Ready) else step
            if isinstance(end, Done):
                return await push.receipt(end, sent)
            attempt = await push.ask() if end.why == "not as left" else Attempt("another transport", attempt.members)
            sent = None

    def status(self) -> tuple[EngineState, ...]:
        """Returns what each engine serves: asked now, or as last heard while a push is running.
        Empty on ranks other than 0."""
        return _run(self.astatus())

    async def astatus(self) -> tuple[EngineState, ...]:
        """Does what `status` does, for asyncio."""
        self._own.check("WeightSync")
        if isinstance(self._role, Follower):
            return ()
        fleet = self._session.fleet
        if not self._busy.locked() and self._asking.acquire(blocking=False):
            try:
                await fleet.each(fleet.members, Member.hello)
            finally:
                self._asking.release()
        return fleet.states()

    def close(self) -> None:
        """Frees the shared memory and releases the engines, so that other trainers may push.
        Engines go on serving what they serve.

        Waits for a push that runs in another thread. May be called twice. Does nothing in a child
        that was forked: all of it is the parent's.

        Raises `ConfigError` where a push is running and an event loop runs in this thread, which
        that push may need: nothing is closed then.
        """
        if not self._own.here():
            return
        if not self._busy.acquire(blocking=not _loop_runs()):
            raise ConfigError(
                "a push is running: it reads from the memory that would be freed",
                next_step="await it, or cancel it and await that, before close()",
            )
        try:
            self._closed = True
            if isinstance(self._role, Lead):
                self._session.fleet.part()
                self._session.current = None
            self._role.close()
        finally:
            self._busy.release()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Locks this object: one push or catch-up runs at a time, none beside a status query."""
        if not self._busy.acquire(blocking=False):
            raise ConfigError("a push is running already: one WeightSync makes one push at a time")
        try:
            if self._closed:
                raise TransportError("the WeightSync was closed", next_step="make a new one")
            while not self._asking.acquire(blocking=False):  # noqa: ASYNC110
                await asyncio.sleep(0.003)  # until `status` has its answer, which may be in another thread
            try:
                yield
            finally:
                self._asking.release()
        finally:
            self._busy.release()

    @asynccontextmanager
    async def _pushing(self, call: str, version: str) -> AsyncIterator[Push]:
        """Runs one push. If it fails, is cancelled or is interrupted, each engine serves one
        whole version or refuses, and other trainers may push to it."""
        push = Push(self._session, version)
        assert isinstance(self._role, Lead)
        try:
            async with self._role.leading(call, version, lambda: push.done):
                try:
                    yield push
                except GeneratorExit:  # the event loop is closed: no engine can be called
                    raise
                except BaseException:
                    with suppress(asyncio.CancelledError):  # the original error is raised below
                        await to_the_end(push.break_off, times=3)
                    raise
        except InstepError as error:
            push.tell(Event("failed", version, error=error))
            raise

    async def _follow(self, role: Follower, call: str, version: str) -> Receipt:
        """Follows rank 0 in a thread, which is waited for even after a cancellation."""
        return await to_the_end(lambda: asyncio.to_thread(role.follow, call, version))


def check_engines(engines: Any) -> None:
    """Raises `ConfigError` for what is no list, and for an engine that is listed twice."""
    if isinstance(engines, str) or not isinstance(engines, Sequence):
        raise ConfigError(f"engines is a list, not {type(engines).__name__}", next_step="write engines=[...], also around a single one")
    if len({engine if isinstance(engine, str) else id(engine) for engine in engines}) < len(engines):
        raise ConfigError("an engine is listed twice")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    if _loop_runs():
        coroutine.close()
        raise ConfigError(
            "an event loop is running in this thread",
            next_step="use what is for asyncio: `await sync.apush(...)`, `await sync.acatch_up(...)`, `await sync.astatus()`",
        )
    return asyncio.run(coroutine)


def _loop_runs() -> bool:
    """Whether an event loop runs in this thread."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
