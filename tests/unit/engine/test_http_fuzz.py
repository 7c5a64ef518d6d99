"""Ten thousand malformed requests, to an engine in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from helpers.asgi import TOKEN, asgi_engine, client, served, state
from helpers.junk import attack
from helpers.toys import attention

from instep import WeightSync

pytestmark = pytest.mark.usefixtures("segments")


def test_ten_thousand_malformed_requests_change_nothing_while_generation_goes_on() -> None:
    at = served()
    with WeightSync(attention(1), [asgi_engine(at)]) as sync:
        sync.push("v1")
    engine: Any = at.engine
    before = state(at)

    async def main() -> tuple[Counter[int], int]:
        async with client(at) as http:

            async def generate() -> None:
                assert (await http.post("/v1/completions", json={})).text == "generated"
                await asyncio.sleep(0)

            return await attack(http, TOKEN, 10_000, generate)

    codes, ended = asyncio.run(main())
    assert ended > 100
    assert codes.total() == 10_000
    assert {400, 401, 404, 409} <= codes.keys()
    assert state(at)[:5] == before[:5]
    assert [worker[:4] for worker in state(at)[5]] == [worker[:4] for worker in before[5]]
    engine.generate([1], 1)
    with WeightSync(attention(2), [asgi_engine(at)]) as sync:
        sync.push("v2")
    assert engine.version == "v2"
