"""Observes the pushes that reach a server's engine: its pauses, its lag, and how each push
ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from instep.engine import CachePolicy, Engine
from instep.errors import EngineLost
from instep.metrics import Lag, Metrics
from instep.protocol import Arrival, Method, PrepareRequest, Reply, Request, decode

logger = logging.getLogger("instep")

STEPS = ("prepare", "ready", "commit")


@dataclass(slots=True)
class Underway:
    """A push that has begun here and has not ended. started: when its preparation began."""

    version: str
    transport: str
    nbytes: int
    started: float
    committed: bool = False


class Observed:
    """Passes everything on to an engine, and notes the pushes.

    metrics: None where nothing is to be counted.
    """

    def __init__(self, engine: Engine, metrics: Metrics | None = None) -> None:
        self.engine, self.metrics, self.name = engine, metrics, engine.name
        self.last_pause: float | None = None
        """Seconds that the last pause took."""
        self.lag = Lag()
        self.underway: Underway | None = None
        self.paused: float | None = None  # since when
        self.labelled: str | None = None
        """The version that it will serve when it goes on."""
        self.by = ""
        """Who brings versions, for the log."""

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        started = time.perf_counter()
        push = _announced(payload, started) if method == "prepare" else self.underway
        try:
            answers = await self.engine.call(method, payload)
        except (EngineLost, asyncio.CancelledError) as error:
            if method in STEPS:
                self._failed(push, "EngineLost" if isinstance(error, EngineLost) else "EngineTimeout")
            raise
        with suppress(msgspec.DecodeError):  # who asked will say so
            self._seen(method, push, answers, started)
        return answers

    async def pause(self, caches: CachePolicy) -> None:
        self.paused = time.perf_counter()
        await self.engine.pause(caches)

    async def resume(self) -> None:
        await self.engine.resume()
        took = ""
        if self.paused is not None:
            self.last_pause, self.paused = time.perf_counter() - self.paused, None
            took = f" (after {self.last_pause:.2f} s)"
            if self.metrics:
                self.metrics.pause.labels(self.name).observe(self.last_pause)
        if self.labelled is not None:
            pushed = f", pushed by {self.by}" if self.by else ""
            logger.info("%s serves %s%s%s", self.name, self.labelled, took, pushed)
            self.labelled = None

    async def label(self, version: str) -> None:
        await self.engine.label(version)
        self.labelled = version
        self.lag.serve(version)
        self._show_lag()
        push = self.underway
        if push is not None and push.committed and push.version == version:
            if self.metrics:
                self.metrics.bytes.labels(push.transport).inc(push.nbytes)
            self._took("total", push.started)
            self._end(push, "ok")

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.engine.score(token_ids)

    async def refuse(self, reason: str | None) -> None:
        await self.engine.refuse(reason)
        if reason is not None:
            self._end(self.underway, "refused")

    def _seen(self, method: Method, push: Underway | None, answers: Sequence[bytes], started: float) -> None:
        if method not in (*STEPS, "trace", "abort"):
            return
        replies = [decode(answer, Reply) for answer in answers]
        fault = next((reply.fault for reply in replies if reply.fault is not None), None)
        if method == "trace" and fault is None:
            self._took("trace", started)
        if push is None:
            return
        if method == "abort":
            self._end(push, "aborted")
        elif method in STEPS and fault is not None:
            self._failed(push, fault.kind)
        elif method == "commit":
            push.committed = True
            self._took("commit", started)
        elif method in STEPS:
            if push is not self.underway:
                self._end(self.underway, "abandoned")
                self.underway = push
                self._begun(push)
            if all(decode(reply.body, Arrival).done for reply in replies):
                self._took("prepare", push.started)

    def _begun(self, push: Underway) -> None:
        self.lag.begin(push.version)
        self._show_lag()

    def _failed(self, push: Underway | None, outcome: str) -> None:
        if push is not None and outcome not in ("VersionConflict", "EngineBusy"):  # which is no version for this engine
            self._begun(push)
        self._end(push, outcome)

    def _end(self, push: Underway | None, outcome: str) -> None:
        if push is not None and self.metrics:
            self.metrics.ended(outcome)
        if push is self.underway:
            self.underway = None

    def _took(self, phase: str, started: float) -> None:
        if self.metrics:
            self.metrics.seconds.labels(phase).observe(time.perf_counter() - started)

    def _show_lag(self) -> None:
        if self.metrics:
            self.metrics.lag.labels(self.name).set(len(self.lag))


def _announced(payload: bytes, started: float) -> Underway | None:
    try:
        manifest = decode(decode(payload, Request).body, PrepareRequest).manifest
    except msgspec.DecodeError:  # the workers will say so
        return None
    return Underway(manifest.version, manifest.location.transport, manifest.nbytes, started)
