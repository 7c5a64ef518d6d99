"""The half of an actor that takes weights: from a `WeightSync`, or from a trainer that sends
tensors one at a time under Open Instruct's method names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from instep.engine import CachePolicy
from instep.engine.fused_commit import FusedCommit, goes_on, step_by_step
from instep.engine.serving import Serving
from instep.errors import EngineLost, EngineTimeout
from instep.generation.actor.background import Background
from instep.generation.actor.client import EngineClient
from instep.generation.actor.work import Work
from instep.protocol import Method, Reply, Request, decode, encode

T = TypeVar("T")
CONTROL = 60.0
"""Seconds for a control call that touches no weights."""
MINUTES = 120.0
"""Minutes for a group to form and for each broadcast. This is Open Instruct's default."""

Status = dict[str, Any]
"""A worker's answer, see `instep.dropin.open_instruct.WorkerWrap`."""


def _committed(statuses: Sequence[Any]) -> bool:
    return any(status.get("committed") for status in statuses if isinstance(status, dict))


class Update:
    """Records the tensor names of this update and of the one before, which tell the next
    update's last tensor before it comes."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.before: set[str] = set()

    def last(self, name: str) -> bool:
        return bool(self.before) and self.names | {name} == self.before

    def came(self, name: str, *, ended: bool) -> None:
        self.names = {name} if name in self.names else self.names | {name}
        if ended:
            self.before = self.names if len(self.names) > 1 or not self.before else self.before
            self.names = set()


class Follower:
    name: str
    inflight_updates: bool
    drain_timeout: float
    _background: Background
    _serving: Serving | None
    _client: EngineClient
    _work: Work
    _turn: asyncio.Lock
    _update: Update

    # What a `WeightSync` calls, from a loop of its own

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return await self._aside(lambda serving: serving.weights.call(method, payload))

    async def pause(self, caches: CachePolicy) -> None:
        await self._in_turn(lambda serving: self._pause(serving, caches))

    async def resume(self) -> None:
        await self._in_turn(self._resume)

    async def label(self, version: str) -> None:
        await self._in_turn(lambda serving: self._label(serving, version))

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self._aside(lambda serving: serving.weights.score(token_ids))

    async def refuse(self, reason: str | None) -> None:
        """Makes turns that have not begun wait until the engine is mended, and ends those under
        way with `abort`."""
        await self._aside(lambda serving: self._refuse(serving, reason))

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes]:
        """See `fused_commit.FusedCommit`. An engine that can commit at once does so, and the
        push does not wait for the first step with the new weights. Where the actor drains before
        a pause, the commit goes step by step."""
        engine = self._started().weights
        if self.inflight_updates and isinstance(engine, FusedCommit):
            answers = await self._aside(lambda _: self._commit_at_once(engine, payload, caches, version))
            if answers is not None:
                return answers
        return await step_by_step(self, payload, caches, version)

    async def _commit_at_once(self, engine: FusedCommit, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """Runs the commit to its end even if this call is cancelled, as the engine does."""

        async def commit() -> list[bytes] | None:
            gate.close("commit")  # no turn begins with the old label once the engine has the new weights
            try:
                answers = await engine.commit_at_once(payload, caches, version)
                if answers is not None and goes_on(answers):
                    self._work.serves(version)
                return answers
            finally:
                gate.open("commit")

        gate = self._client.gate
        return await asyncio.shield(commit())

    # Open Instruct's names: tensors wait in the workers, and the last one commits them all. The
    # workers need the extension `instep.dropin.open_instruct.WorkerWrap`, whose errors these raise
    # or return

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
        timeout_minutes: float = MINUTES,
    ) -> list[Status]:
        """Has the workers join the trainer's group, with ranks from `rank_offset` on."""
        arguments = (master_address, master_port, rank_offset, world_size, group_name, backend, use_ray, timeout_minutes)
        self._update = Update()  # another trainer may send in another order
        joining = self._started().collective_rpc("init_process_group", arguments)
        return self._background.run(joining, timeout_minutes * 60 + CONTROL)

    def update_weight(self, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool | None = None) -> list[Status]:
        """Receives one tensor from rank 0's broadcast. empty_cache: whether this tensor is the
        last one, with which all of them are committed. If None, the actor recognises the end of
        an update by itself."""
        return self._bring("update_weight", (name, dtype, list(shape)), empty_cache)

    def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Sequence[int], ipc_handles: Any = None, empty_cache: bool | None = None
    ) -> list[Status]:
        """Reads one tensor from the trainer's memory on this GPU."""
        return self._bring("update_weight_cuda_ipc", (name, dtype, list(shape), ipc_handles), empty_cache)

    def finish_update(self, version: str | None = None) -> list[Status]:
        """Commits the tensors that came since the last commit, under the label `version`, or none
        of them."""
        committing = self._commit(self._started(), "finish_update", (version,))
        return self._background.run(committing, MINUTES * 60 + self.drain_timeout + CONTROL)

    def _bring(self, method: str, arguments: tuple[Any, ...], empty_cache: bool | None) -> list[Status]:
        serving, expected = self._started(), self._update.last(arguments[0])
        may_end = empty_cache or (empty_cache is None and (expected or not self.inflight_updates))
        bring = self._commit if may_end else self._stage
        arguments = arguments if empty_cache is None else (*arguments, empty_cache)
        statuses = self._background.run(bring(serving, method, arguments), MINUTES * 60 + self.drain_timeout + CONTROL)
        self._update.came(arguments[0], ended=_committed(statuses))
        return statuses

    async def _stage(self, serving: Serving, method: str, arguments: Sequence[Any]) -> list[Status]:
        """Brings a tensor that is not known to be the last one. If it was the last one, the
        workers have committed between two steps, and the label follows here."""
        statuses = await serving.collective_rpc(method, arguments)
        if _committed(statuses):
            await self._refuse(serving, await self._dirty(serving))
        return statuses

    async def _commit(self, serving: Serving, method: str, arguments: Sequence[Any]) -> list[Status]:
        """Commits between two steps of the engine, so that no token has the label of another
        version."""
        await self._pause(serving, "keep")
        try:
            statuses = await serving.collective_rpc(method, arguments)
        finally:
            dirty = await self._dirty(serving)
            if dirty is None:
                await self._resume(serving)
            await self._refuse(serving, dirty)
        return statuses

    async def _dirty(self, serving: Serving) -> str | None:
        """Returns why the workers hold no whole version, or None. If all hold the same one, the
        engine is labelled with that version."""
        answers = await serving.weights.call("status", encode(Request(0, self.name)))
        replies = [decode(answer, Reply) for answer in answers]
        versions = {reply.version for reply in replies}
        if len(versions) > 1 or any(reply.state != "serving" for reply in replies):
            return f"its workers hold parts of several versions: {', '.join(map(str, versions))}"
        version = versions.pop()
        if version is not None and version != self._client.version:
            await self._label(serving, version)
        return None

    # What both do

    async def _pause(self, serving: Serving, caches: CachePolicy) -> None:
        if not self.inflight_updates:
            await self._drain()
        await serving.weights.pause(caches)

    async def _drain(self) -> None:
        """Waits until no turn is inside, while the engine goes on: it is paused when it is
        empty."""
        gate = self._client.gate
        gate.close("update")
        try:
            async with asyncio.timeout(self.drain_timeout):
                await gate.empty()
        except BaseException as error:
            left = gate.inside
            gate.open("update")
            if not isinstance(error, TimeoutError):
                raise
            raise EngineTimeout(
                f"{self.name} did not end {left} turns within {self.drain_timeout:g} s",
                next_step="it goes on with the weights it has: allow it more time, shorter turns, or inflight_updates=True",
            ) from None

    async def _resume(self, serving: Serving) -> None:
        await serving.weights.resume()
        self._client.gate.open("update")

    async def _label(self, serving: Serving, version: str) -> None:
        await serving.weights.label(version)
        self._work.serves(version)

    async def _refuse(self, serving: Serving, reason: str | None) -> None:
        if reason is not None:
            self._client.gate.close("dirty")
        await serving.weights.refuse(reason)
        if reason is None:
            self._client.gate.open("dirty")

    def _started(self) -> Serving:
        if self._serving is None or self._background.closed:
            raise EngineLost(f"{self.name} is closed")
        return self._serving

    async def _in_turn(self, call: Callable[[Serving], Awaitable[T]]) -> T:
        """Runs calls one after the other, in the order in which they came. A trainer in another
        process that has given up on a step asks for the next while the first still runs here."""

        async def run(serving: Serving) -> T:
            async with self._turn:
                return await call(serving)

        return await self._aside(run)

    async def _aside(self, call: Callable[[Serving], Awaitable[T]]) -> T:
        serving = self._started()

        async def run() -> T:
            return await call(serving)

        return await self._background.aside(run())
