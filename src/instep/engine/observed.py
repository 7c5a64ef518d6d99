"""What a server sees of the pushes that reach its engine: how long it paused, how far it is behind, how each push ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from instep.engine import CachePolicy, Engine
from instep.errors import EngineLost
from instep.metrics import Lag, Metrics
from instep.protocol import Arrival, Method, PrepareRequest, Reply, Request, decode


@dataclass(slots=True)
class Underway:
    """A push that was prepared here and has not ended. started: of its preparation."""

    version: str
    transport: str
    nbytes: int
    started: float
    committed: bool = False


class Observed:
    """The engine itself, with an eye on what passes through.

    metrics: None where nothing is to be counted.
    """

    def __init__(self, engine: Engine, metrics: Metrics | None = None) -> None:
        self.engine, self.metrics = engine, metrics
        self.last_pause: float | None = None
        """Seconds that the last pause took."""
        self.lag = Lag()
        self.underway: Underway | None = None
        self.paused: float | None = None  # since when

    @property
    def name(self) -> str:
        return self.engine.name

    @name.setter
    def name(self, name: str) -> None:
        self.engine.name = name

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        started = time.perf_counter()
        if method == "prepare":
            self._begin(payload, started)
        try:
            answers = await self.engine.call(method, payload)
        except EngineLost:
            self._end("EngineLost")
            raise
        self._seen(method, answers, started)
        return answers

    async def pause(self, caches: CachePolicy) -> None:
        self.paused = time.perf_counter()
        await self.engine.pause(caches)

    async def resume(self) -> None:
        await self.engine.resume()
        if self.paused is not None:
            self.last_pause, self.paused = time.perf_counter() - self.paused, None
            if self.metrics:
                self.metrics.pause.labels(self.name).observe(self.last_pause)

    async def label(self, version: str) -> None:
        await self.engine.label(version)
        self.lag.serve(version)
        push = self.underway
        if push is not None and push.committed and push.version == version:
            if self.metrics:
                self.metrics.bytes.labels(push.transport).inc(push.nbytes)
                self.metrics.seconds.labels("total").observe(time.perf_counter() - push.started)
            self._end("ok")
        self._show_lag()

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.engine.score(token_ids)

    async def refuse(self, reason: str | None) -> None:
        await self.engine.refuse(reason)
        if reason is not None:
            self._end("refused")

    def _begin(self, payload: bytes, started: float) -> None:
        try:
            manifest = decode(decode(payload, Request).body, PrepareRequest).manifest
        except msgspec.DecodeError:
            return  # the workers will say so
        nbytes = sum(meta.nbytes for meta in manifest.tensors if not meta.alias_of)
        self._end("abandoned")
        self.underway = Underway(manifest.version, manifest.location.transport, nbytes, started)
        self.lag.begin(manifest.version)
        self._show_lag()

    def _seen(self, method: Method, answers: Sequence[bytes], started: float) -> None:
        push = self.underway
        if method not in ("trace", "prepare", "ready", "commit", "abort"):
            return
        replies = [decode(answer, Reply) for answer in answers]
        fault = next((reply.fault for reply in replies if reply.fault is not None), None)
        if method == "trace":
            self._took("trace", started)
        elif push is None:
            return
        elif fault is not None and method != "abort":
            self._end(fault.kind)
        elif method == "commit":
            push.committed = True
            self._took("commit", started)
        elif method == "abort":
            self._end("aborted")
        elif all(decode(reply.body, Arrival).done for reply in replies):
            self._took("prepare", push.started)

    def _took(self, phase: str, started: float) -> None:
        if self.metrics:
            self.metrics.seconds.labels(phase).observe(time.perf_counter() - started)

    def _end(self, outcome: str) -> None:
        if self.underway is not None and self.metrics:
            self.metrics.ended(outcome)
        self.underway = None

    def _show_lag(self) -> None:
        if self.metrics:
            self.metrics.lag.labels(self.name).set(len(self.lag))
