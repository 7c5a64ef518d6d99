"""What goes wrong in a push from several ranks, and what each rank is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from helpers.rank_models import Sharded, make, plain
from helpers.rank_ways import opened
from helpers.source_models import saved
from instep import WeightSync
from instep.engine.memory import MemoryEngine
from instep.errors import InstepError, SourceError
from instep.ranks import follow, gather
from instep.ranks.channel import Channel
from instep.ranks.run import Run
from instep.transport.broadcast.read import Buckets

RANK = int(os.environ["RANK"])


def attempt(call: Callable[..., Any]) -> dict[str, Any]:
    """How a call ends, and after how long."""
    started = time.monotonic()
    try:
        call()
        error, kind = None, None
    except InstepError as failure:
        error, kind = str(failure), type(failure).__name__
    return {"error": error, "kind": kind, "seconds": time.monotonic() - started}


def begun(way: str, wrap: str = "fsdp2", model: str = "llama", **settings: Any) -> tuple[Sharded, Any, WeightSync]:
    trainer = make(wrap, model)
    engine = MemoryEngine(saved(plain(model, seed=1))) if RANK == 0 else None
    torch.distributed.barrier()  # short deadlines begin when all are ready
    return trainer, engine, opened(trainer.module, engine, way, **settings)


def ended(sync: WeightSync, engine: Any, **found: Any) -> dict[str, Any]:
    """With a push that works again, and what the engine served before it."""
    served = engine.version if engine else None
    after = attempt(lambda: sync.push("after"))
    sync.close()
    return {**found, "served": served, "after": after["error"], "serves": engine.version if engine else None}


def engine_fails(way: str) -> dict[str, Any]:
    _, engine, sync = begun(way)
    sync.push("v0")
    if engine:
        engine.inject("prepare", "error")
    found = attempt(lambda: sync.push("v1"))
    return ended(sync, engine, **found)


def failing(receive: Callable[..., Any], bucket: int) -> Callable[..., Any]:
    """An engine's way to receive buckets that ends with an error at one of them."""

    def received(buckets: Buckets, *, ahead: bool) -> Any:
        for index, part in receive(buckets, ahead=ahead):
            if index == bucket:
                raise RuntimeError("the engine's memory is full")
            yield index, part

    return received


def engine_fails_while_a_rank_is_slow() -> dict[str, Any]:
    """The engine fails at the third bucket, while rank 0 waits for the last rank's part of the fourth. When each wait has ended."""
    _, engine, sync = begun("one", timeout=60.0)
    sync.push("v0")
    real_take, real_give = gather.take, gather.give
    calls, moments = count(), list[float]()

    def take(*arguments: Any) -> None:
        try:
            real_take(*arguments)
        except InstepError:
            moments.append(time.monotonic())
            raise

    def give(*arguments: Any) -> None:
        if next(calls) == 3 and int(os.environ["WORLD_SIZE"]) - 1 == RANK:
            time.sleep(4)
            moments.append(time.monotonic())
        real_give(*arguments)

    with patch.object(Buckets, "each", failing(Buckets.each, 2)), patch.object(gather, "take", take), patch.object(follow, "give", give):
        found = attempt(lambda: sync.push("v1"))
    return ended(sync, engine, **found, moments=moments)


def rank_fails(way: str, tensors: str) -> dict[str, Any]:
    """Rank 1 cannot read its source when it has read so many tensors."""
    _, engine, sync = begun(way)
    sync.push("v0")
    if RANK == 1:
        role: Any = sync._role
        memory = role.module.memory

        left = count(int(tensors), -1)

        def broken(name: str) -> Any:
            if next(left):
                return memory(name)
            role.module.memory = memory
            raise SourceError("the disk with the offloaded shard is gone", tensor="norm")

        role.module.memory = broken
    found = attempt(lambda: sync.push("v1"))
    return ended(sync, engine, **found)


def engine_fails_midway(model: str) -> dict[str, Any]:
    """The engine fails at the sixth bucket. How many questions for stretches this rank asked, and how many stretches it gave until then."""
    trainer, engine, sync = begun("one", model=model, timeout=60.0)
    sync.push("v0")
    trainer.backward()
    trainer.step()
    real_give, real_tell = gather.give, Channel.tell
    asked, given = [], []

    def give(*arguments: Any) -> None:
        given.append(arguments)
        real_give(*arguments)

    def tell(channel: Channel, what: str, body: Any = None) -> None:
        asked.append(what)
        real_tell(channel, what, body)

    with patch.object(Buckets, "each", failing(Buckets.each, 5)), patch.object(follow, "give", give), patch.object(Channel, "tell", tell):
        found = attempt(lambda: sync.push("v1"))
    found = ended(sync, engine, **found, asked=asked.count("give"), given=len(given))
    wanted = MemoryEngine(saved(trainer.gathered())).fingerprint()
    return {**found, "same": engine is None or engine.fingerprint() == wanted}


def rank_is_absent() -> dict[str, Any]:
    """Rank 1 makes no call; it is there again for the next one."""
    _, engine, sync = begun("shm", timeout=5.0)
    sync.push("v0")
    torch.distributed.barrier()
    found = attempt(lambda: sync.push("v1")) if RANK != 1 else {}
    torch.distributed.barrier()
    return ended(sync, engine, **found)


def rank_is_ahead() -> dict[str, Any]:
    """Rank 1 leaves a call out and makes the next one at once."""
    _, engine, sync = begun("shm", timeout=20.0)
    sync.push("v0")
    found = attempt(lambda: sync.push("v1")) if RANK != 1 else {}
    return ended(sync, engine, **found)


def leader_is_absent() -> dict[str, Any]:
    _, engine, sync = begun("shm", timeout=5.0)
    sync.push("v0")
    torch.distributed.barrier()
    found = attempt(lambda: sync.push("v1")) if RANK > 0 else {}
    torch.distributed.barrier()
    return ended(sync, engine, **found)


def versions_differ() -> dict[str, Any]:
    _, engine, sync = begun("shm", timeout=5.0)
    sync.push("v0")
    torch.distributed.barrier()
    found = attempt(lambda: sync.push("v1" if RANK != 1 else "v2"))
    torch.distributed.barrier()
    return ended(sync, engine, **found)


def rank_dies(way: str, bucket: str) -> dict[str, Any]:
    """The last rank is killed while it gives its part of a bucket, or while it writes to the segment."""
    _, engine, sync = begun(way, timeout=60.0)
    sync.push("v0")
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        calls = []

        def dying(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) > int(bucket):
                os._exit(9)
            return real(*arguments)

        owner, name = (Run, "put") if way == "shm" else (follow, "give")
        real = getattr(owner, name)
        setattr(owner, name, dying)
    found = attempt(lambda: sync.push("v1"))
    served = engine.version if engine else None
    return {**found, "served": served}


def leader_dies(bucket: str) -> dict[str, Any]:
    """Rank 0 is killed while it takes others' parts of a bucket."""
    _, _, sync = begun("one", timeout=60.0)
    sync.push("v0")
    if RANK == 0:
        real, left = gather.take, count(int(bucket), -1)

        def dying(*arguments: Any) -> None:
            if not next(left):
                os._exit(9)
            real(*arguments)

        patch.object(gather, "take", dying).start()
    return attempt(lambda: sync.push("v1"))


def slow_receiver() -> dict[str, Any]:
    """The engine takes its time for each bucket. When each rank began and ended its part of each, on one clock."""
    _, engine, sync = begun("one", timeout=60.0)
    sync.push("v0")
    real_receive, real_take, real_give = Buckets.each, gather.take, gather.give
    seen: list[tuple[str, float, float]] = []
    rooms: list[int] = []

    def timed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(meeting: Any, *arguments: Any) -> Any:
            started = time.monotonic()
            result = real(meeting, *arguments)
            seen.append((real.__name__, started, time.monotonic()))
            rooms.append(len(meeting.room))
            return result

        return call

    def slow(buckets: Buckets, *, ahead: bool) -> Any:
        for index, part in real_receive(buckets, ahead=ahead):
            seen.append(("received", time.monotonic(), 0.0))
            time.sleep(0.05)
            yield index, part

    with (
        patch.object(Buckets, "each", slow),
        patch.object(gather, "take", timed(real_take)),
        patch.object(follow, "give", timed(real_give)),
    ):
        sync.push("v1")
    return ended(sync, engine, seen=seen, room=max(rooms, default=0))


FAILURES: dict[str, Callable[..., dict[str, Any]]] = {
    "engine-fails": engine_fails,
    "engine-fails-midway": engine_fails_midway,
    "engine-fails-while-a-rank-is-slow": engine_fails_while_a_rank_is_slow,
    "rank-fails": rank_fails,
    "rank-is-absent": rank_is_absent,
    "rank-is-ahead": rank_is_ahead,
    "leader-is-absent": leader_is_absent,
    "versions-differ": versions_differ,
    "rank-dies": rank_dies,
    "leader-dies": leader_dies,
    "slow-receiver": slow_receiver,
}
