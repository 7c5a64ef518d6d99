"""Requests to an engine's control routes that are wrong in one way or another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from helpers.asgi import MSGPACK, ROUTES, call, request
from instep.engine.remote.http_control import PREFIX
from instep.protocol import CommitRequest

WORKERS = 8


def junk(rng: random.Random, number: int) -> tuple[str, bytes]:
    """A route and a body."""
    route = rng.choice(ROUTES)
    good = call(number, request(CommitRequest("v")), name="fuzz")
    body = bytearray(good)
    how = rng.randrange(6)
    if how == 0:
        return route, rng.randbytes(rng.randrange(200))
    if how == 1:
        return route, bytes(body[: rng.randrange(len(body))])
    if how == 2:
        for _ in range(rng.randrange(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return rng.choice(("trace", "prepare", "commit", "pause", "label", "score", "refuse")), bytes(body)
    if how == 3:
        return route, rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb")) + b"\xff\xff\xff\xff" + rng.randbytes(8)
    if how == 4:
        return rng.choice(("call", "gone", "x" * 300, "%00", "hello/hello")), good
    return "commit", call(number, request(CommitRequest(f"v{number}")), name="fuzz")


async def attack(http: httpx.AsyncClient, token: str, count: int, generate: Callable[[], Awaitable[None]]) -> tuple[Counter[int], int]:
    """Sends `count` of them, a tenth without the right token, while `generate` is awaited again and again.

    The status codes, all of them 4xx, and how often `generate` ended.
    """
    codes: Counter[int] = Counter()
    done = asyncio.Event()

    async def send(worker: int) -> None:
        rng = random.Random(worker)
        for index in range(count // WORKERS):
            route, body = junk(rng, worker * count + index + 1)
            given = token if rng.random() < 0.9 else rng.randbytes(9).hex()
            answer = await http.post(f"{PREFIX}/{route}", content=body, headers={**MSGPACK, "authorization": f"Bearer {given}"})
            codes[answer.status_code] += 1
            assert 400 <= answer.status_code < 500, (route, body, answer.content)

    async def generating() -> int:
        ended = 0
        while not done.is_set():
            await generate()
            ended += 1
        return ended

    task = asyncio.create_task(generating())
    try:
        await asyncio.gather(*(send(worker) for worker in range(WORKERS)))
    finally:
        done.set()
        ended = await task
    return codes, ended
