"""An engine in memory, for tests of your own training loop: no GPU, no vLLM, milliseconds.

    engine = MemoryEngine(model.state_dict(), tp=2)
    sync = WeightSync(source=model, engines=[engine])
    engine.inject("commit", "error")          # the next push fails there
    engine.generate([1, 2, 3], max_tokens=4)  # tokens that depend on every weight

It stores weights as engines do: q, k and v fused, gate and up fused, experts packed, vocabulary
padded, the head tied where the checkpoint has none, tensor-parallel slices, a tensor derived from
weights, a prefix cache. Its workers run the same receiver as vLLM's.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Literal, get_args

import msgspec
import numpy as np
import torch

from instep.digest import MASK, mix
from instep.engine import CachePolicy
from instep.engine.gate import CHANGING, Gate
from instep.engine.memory_host import MemoryHost
from instep.errors import ConfigError, EngineLost
from instep.protocol import Manifest, Method, Request, decode
from instep.receiver.state import Receiver
from instep.transport.reader import Reader, WorkerContext
from instep.transport.registry import brief, open_location

Point = Literal["hello", "trace", "prepare", "ready", "tensor", "commit", "digest", "label", "pause", "resume", "abort"]
Kind = Literal["error", "hang", "die"]

HELD = 60.0
"""Seconds for which `generate` waits for a push to end."""

ANSWERED: tuple[Method, ...] = ("hello", "status", "ready", "reserve", "accept")
"""What a worker answers from what it knows."""

FEW = 256
"""Tensors up to which a small version is opened and copied in the thread that asks: threads of
many engines would wait for each other's turn to run Python."""

THREADS = 8
"""The most of them for workers of all engines: more would wait for each other, as Python runs one
at a time."""


class _Location(msgspec.Struct):
    transport: str
    nbytes: int


class _Manifest(msgspec.Struct):
    location: _Location


class _Prepare(msgspec.Struct):
    """What a `PrepareRequest` says of where the bytes lie."""

    manifest: _Manifest


def _few(worker: Receiver) -> bool:
    return len(worker.expected.tensors) <= FEW


def _opens(payload: bytes) -> bool:
    """Whether the version of a request to prepare is opened in less time than a thread takes."""
    try:
        location = decode(decode(payload, Request).body, _Prepare).manifest.location
    except msgspec.DecodeError:
        return False  # the worker says what is wrong
    return brief(location.transport, location.nbytes)


def _copies(worker: Receiver) -> bool:
    """Whether a commit copies a small version, and runs nothing of the engine's own."""
    prepared, applier = worker.prepared, worker.applier
    small = prepared is not None and prepared.reader.at_once and _few(worker)
    return small and worker.state == "serving" and applier is not None and not (applier.reload or applier.rebuild)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "instep-memory")


os.register_at_fork(after_in_child=_threads.cache_clear)  # its threads are not in a child


class MemoryEngine:
    """An engine in memory: a test double that stores weights as engines do and fails where it is
    told to.

    checkpoint: names and tensors as `save_pretrained` writes them; the shapes the engine is built
    from, and its first weights.
    tp: tensor-parallel workers. Where they do not divide a size the last ones have less.

    Raises `ConfigError` for a checkpoint that is no mapping, and for less than one worker.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], *, tp: int = 1, name: str = "memory") -> None:
        if not isinstance(checkpoint, Mapping):
            raise ConfigError(
                f"a MemoryEngine is made of names and tensors, not of a {type(checkpoint).__name__}", next_step="model.state_dict()"
            )
        if not isinstance(tp, int) or tp < 1:
            raise ConfigError(f"tp is the number of an engine's workers, 1 or more, not {tp!r}")
        self.name = name
        self.hosts = [MemoryHost(checkpoint, rank, tp) for rank in range(tp)]
        for host in self.hosts:
            with host.reload():
                host.load(checkpoint.items())
        self.receivers = [Receiver(host, self._open) for host in self.hosts]
        self._busy = [threading.Lock() for _ in range(tp)]  # each worker takes one call after the other
        self.version: str | None = None
        self._gate = Gate()
        self.dead = False
        self.prefix_cache: dict[tuple[int, ...], int] = {}
        self.faults: dict[str, Kind] = {}
        self.calls: list[str] = []

    @property
    def paused(self) -> bool:
        return self._gate.paused

    @property
    def refusal(self) -> str | None:
        """Why the engine does not generate; None if it does."""
        return self._gate.refusal

    def inject(self, point: Point, kind: Kind = "error", *, tensor: int = 0) -> None:
        """Makes the next call that reaches `point` fail, hang until its deadline, or take the
        process down.

        `tensor` is the index of the tensor at which the last worker's loader fails, for the point
        "tensor". Raises `ConfigError` for a point or a kind that is not there.
        """
        for given, known in ((point, get_args(Point)), (kind, get_args(Kind))):
            if given not in known:
                raise ConfigError(f"cannot inject {given!r}; known: {', '.join(known)}")
        if point == "tensor":
            self.hosts[-1].fail_at = tensor
        else:
            self.faults[point] = kind

    def restart(self, checkpoint: Mapping[str, torch.Tensor]) -> MemoryEngine:
        """Makes a new engine of the same name and size that starts from `checkpoint`."""
        return MemoryEngine(checkpoint, tp=len(self.hosts), name=self.name)

    def generate(self, prompt: Sequence[int], max_tokens: int, *, adapter: int = 0) -> list[int]:
        """Tokens below 1000 that follow from every weight and the prompt. A prompt seen before is
        answered from the prefix cache.

        adapter: the LoRA adapter to use, by its number.

        Waits while it is paused, as an engine holds its requests back. Raises `EngineDirty` while a
        push has left it with parts of two versions, `RuntimeError` where nobody has it go on within
        60 s.
        """
        with self._gate.passing(self.name, HELD):
            weights = self.prefix_cache.setdefault((-adapter, *prompt) if adapter else tuple(prompt), self.fingerprint(adapter))
        state = mix(np.array([weights], np.uint64) + np.uint64(hash(tuple(prompt)) & MASK))
        tokens = []
        for _ in range(max_tokens):
            state = mix(state)
            tokens.append(int(state[0] % np.uint64(1000)))
        return tokens

    def fingerprint(self, adapter: int = 0) -> int:
        """A number that depends on every bit of every weight and derived tensor of every worker,
        and of an adapter's."""
        return sum(host.fingerprint(adapter) for host in self.hosts) & MASK

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        await self._point(method)
        loop = asyncio.get_running_loop()
        workers = list(zip(self._busy, self.receivers, strict=True))
        if self._at_once(method, payload):
            return [self._handle(turn, worker, method, payload) for turn, worker in workers]
        calls = [loop.run_in_executor(_threads(), self._handle, turn, worker, method, payload) for turn, worker in workers]
        replies = [await call for call in calls]
        for host in self.hosts:
            if method == "commit" and host.failed:
                host.fail_at, host.failed = None, False
        return replies

    def _at_once(self, method: Method, payload: bytes) -> bool:
        """Whether a call takes less time than a thread takes to begin with it. To give up a version
        that is prepared may take longer: a thread reads it."""
        if any(turn.locked() for turn in self._busy):
            return False
        if method == "prepare":
            return all(map(_few, self.receivers)) and _opens(payload)
        if method == "commit":
            return self._gate.empty and all(map(_copies, self.receivers))
        return method in ANSWERED or (method == "abort" and not any(worker.prepared for worker in self.receivers))

    def _handle(self, turn: threading.Lock, receiver: Receiver, method: Method, payload: bytes) -> bytes:
        with turn, self._gate.changing() if method in CHANGING else nullcontext():
            return receiver.handle(method, payload)

    async def pause(self, caches: CachePolicy) -> None:
        await self._point("pause")
        await self._gate.pause()
        if caches == "reset":
            self.prefix_cache.clear()

    async def resume(self) -> None:
        await self._point("resume")
        self._gate.resume()

    async def label(self, version: str) -> None:
        await self._point("label")
        self.version = version

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns numbers in the place of log-probabilities. They depend on the weights, and no
        trainer can compute them."""
        return [-(1 + (self.fingerprint() >> shift % 48) % 1000 / 1000) for shift in token_ids[1:]]

    async def refuse(self, reason: str | None) -> None:
        self._gate.refuse(reason)

    async def _point(self, point: str) -> None:
        self.calls.append(point)
        if self.dead:
            raise EngineLost(f"{self.name} is dead")
        kind = self.faults.pop(point, None)
        if kind == "hang":
            await asyncio.sleep(math.inf)  # the loop keeps who sleeps: a task that only it refers to is collected
        if kind == "die":
            self.dead = True
            raise EngineLost(f"{self.name} died in {point}")
        if kind == "error":
            raise EngineLost(f"{self.name} was told to fail at {point}")

    def _open(self, manifest: Manifest, me: WorkerContext) -> Reader:
        reader = open_location(manifest, me)
        if self.faults.pop("digest", None):
            vars(reader)["bytes"] = vars(reader)["bytes"] ^ np.uint8(1)
        return reader
