"""The way from rollouts to an engine, with a gate in it that a weight update closes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from instep.engine.serving import Sampled, Serving
from instep.generation.sampling import Sampling
from instep.generation.types import Completion, RequestId, VersionSpan


class Gate:
    """Lets turns of rollouts through to the engine while nothing has closed it. Used on one event
    loop.

    A tool at work is on this side of the gate: closing waits for turns that the engine works on,
    and for nothing else.
    """

    def __init__(self) -> None:
        self.closed: set[str] = set()
        """Why it is closed."""
        self.inside = 0
        self._waiting: dict[RequestId, asyncio.Future[bool]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self, id: RequestId) -> bool:
        """Waits until the gate is open. Returns False if the turn was turned away meanwhile;
        otherwise `leave` must follow."""
        while self.closed:
            self._waiting[id] = asyncio.get_running_loop().create_future()
            try:
                if not await self._waiting[id]:
                    return False
            finally:
                self._waiting.pop(id, None)
        self.inside += 1
        self._empty.clear()
        return True

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    def turn_away(self, id: RequestId) -> bool:
        """Turns away the turn `id`. Returns whether that turn was waiting here."""
        return self._answer(id, False)

    def close(self, reason: str) -> None:
        self.closed.add(reason)

    async def empty(self) -> None:
        """Waits until no turn is inside."""
        await self._empty.wait()

    def open(self, reason: str) -> None:
        self.closed.discard(reason)
        if not self.closed:
            for id in list(self._waiting):
                self._answer(id, True)

    def _answer(self, id: RequestId, let_in: bool) -> bool:
        waiting = self._waiting.get(id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(let_in)
        return True


class EngineClient:
    """A rollout's `Client` for an engine that serves requests.

    Cached prefixes are shared by requests that began with the same version and by no others, so
    that also with `caches="keep"` a turn that begins after a push computes its context with the new
    weights.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.gate = Gate()
        self.version: str | None = None
        """That a request which begins now is labelled with, where the engine itself does not
        say."""
        self._running: dict[RequestId, str] = {}

    async def complete(self, prompt_token_ids: Sequence[int], sampling: Sampling, id: RequestId, turn: int) -> Completion:
        if not await self.gate.enter(id):
            return Completion(token_ids=[], logprobs=[], finish_reason="abort", versions=[])
        version = self.version
        self._running[id] = f"{id}/{turn}"
        try:
            sampled = await self.serving.generate(prompt_token_ids, sampling.vllm_kwargs(), self._running[id], version)
        finally:
            self._running.pop(id, None)
            self.gate.leave()
        return _completion(sampled, version)

    async def abort(self, id: RequestId) -> None:
        if not self.gate.turn_away(id) and id in self._running:
            await self.serving.abort(self._running[id])


def _completion(sampled: Sampled, version: str | None) -> Completion:
    spans = sampled.versions if sampled.versions is not None else [(version or UNNAMED, 0, len(sampled.token_ids))]
    return Completion(
        token_ids=sampled.token_ids, logprobs=sampled.logprobs, finish_reason=sampled.finish_reason, stop_reason=sampled.stop_reason,
        versions=[VersionSpan(*span) for span in spans],
    )  # fmt: skip


UNNAMED = "default"
"""vLLM's own label of the weights that an engine starts with."""
