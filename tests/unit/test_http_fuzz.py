"""Ten thousand requests that are wrong in one way or another."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from asgi import ALLOWED, MSGPACK, ROUTES, asgi_engine, call, client, request, served, state
from toys import attention

from instep import WeightSync
from instep.engine.http_control import PREFIX
from instep.protocol import CommitRequest

pytestmark = pytest.mark.usefixtures("segments")


def junk(rng: random.Random, number: int) -> tuple[str, bytes]:
    """A request that is wrong in one of many ways."""
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


def test_ten_thousand_malformed_requests_change_nothing_while_generation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    at = served()
    with WeightSync(attention(1), [asgi_engine(at)]) as sync:
        sync.push("v1")
    engine: Any = at.engine
    before = state(at)
    rng = random.Random(7)
    codes: dict[int, int] = {}

    async def attack(http: httpx.AsyncClient, worker: int) -> None:
        for index in range(1250):
            route, body = junk(rng, worker * 10_000 + index + 1)
            headers = ALLOWED if rng.random() < 0.9 else {**MSGPACK, "authorization": "Bearer " + rng.randbytes(9).hex()}
            answer = await http.post(PREFIX + "/" + route, content=body, headers=headers)
            codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
            assert 400 <= answer.status_code < 500, (route, body, answer.content)

    async def generate(http: httpx.AsyncClient, done: asyncio.Event) -> int:
        count = 0
        while not done.is_set():
            assert (await http.post("/v1/completions", json={})).text == "generated"
            count += 1
            await asyncio.sleep(0)
        return count

    async def main() -> int:
        done = asyncio.Event()
        async with client(at) as http:
            generating = asyncio.create_task(generate(http, done))
            await asyncio.gather(*(attack(http, worker) for worker in range(8)))
            done.set()
            return await generating

    assert asyncio.run(main()) > 100
    assert state(at)[:5] == before[:5]
    assert [worker[:4] for worker in state(at)[5]] == [worker[:4] for worker in before[5]]
    assert sum(codes.values()) == 10_000
    assert {400, 401, 404, 409} <= codes.keys()
    engine.generate([1], 1)
    with WeightSync(attention(2), [asgi_engine(at)]) as sync:
        sync.push("v2")
    assert engine.version == "v2"
