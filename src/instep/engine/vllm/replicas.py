"""A vLLM with data parallelism: the workers of all its replicas are one engine's workers to a
trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from instep.protocol import Identity, Reply, WorkerReceipt, decode, encode, raw

NUMBERED: dict[str, type[Identity | WorkerReceipt]] = {"hello": Identity, "status": Identity, "commit": WorkerReceipt}
"""Calls whose answer has the worker's rank in it."""


async def call_workers(llm: Any, method: str, payload: bytes) -> list[bytes]:
    """Returns one reply from each worker of an `AsyncLLM`. vLLM's own call asks all replicas
    too, but returns only the first one's replies."""
    core = llm.engine_core
    replicas = getattr(core, "core_engines", ())
    if len(replicas) < 2:
        replies: list[bytes] = await llm.collective_rpc("instep_call", args=(method, payload))
        return replies
    call = ("collective_rpc", "instep_call", None, (method, payload), None)
    return renumbered(method, await asyncio.gather(*(core._call_utility_async(*call, engine=replica) for replica in replicas)))


def renumbered(method: str, answers: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Returns the replies of all replicas' workers, ranks counted through as in one engine."""
    world_size = sum(map(len, answers))
    found: list[bytes] = []
    for answer in answers:
        first = len(found)
        for reply in (decode(data, Reply) for data in answer):
            rank, body = first + reply.rank, reply.body
            if reply.fault is None and method in NUMBERED:
                told = structs.replace(decode(body, NUMBERED[method]), rank=rank)
                body = raw(structs.replace(told, world_size=world_size) if isinstance(told, Identity) else told)
            found.append(encode(structs.replace(reply, rank=rank, body=body)))
    return found
