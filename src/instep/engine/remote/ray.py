"""An `Rpc` to a Ray actor that holds an engine and hands requests to an `Endpoint`."""

from __future__ import annotations

import asyncio
from typing import Any

from instep.errors import EngineLost


class RayRpc:
    """Sends requests to a Ray actor. actor: the handle of one with a method `answer(method,
    payload)`, synchronous or not."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.name = f"actor-{actor._actor_id.hex()[:8]}"

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            answer: bytes = await asyncio.wrap_future(self.actor.answer.remote(method, payload).future())
        except Exception as error:
            raise EngineLost(f"{self.name} gave no answer: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}") from error
        return answer
