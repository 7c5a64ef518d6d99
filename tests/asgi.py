"""An engine's control routes without a socket."""

from __future__ import annotations

from typing import Any

import httpx

from instep.engine.http import HttpEngine, HttpRpc
from instep.engine.http_control import TO_WORKERS, Control, Receive, Scope, Send, Served
from instep.engine.rpc import Answer
from instep.protocol import encode

TOKEN = "a token of the tests"[::-1].replace(" ", "-")


async def generating(scope: Scope, receive: Receive, send: Send) -> None:
    """What an inference server would be."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"generated"})


def app(served: Served) -> Control:
    return Control(generating, lambda _: served)


def answering(engine: Any, answer: Answer) -> Served:
    """Requests go to `answer` as they are."""
    served = Served(engine, TOKEN)

    async def unchecked(route: str, payload: bytes) -> bytes:
        return await (answer("call", encode((route, payload))) if route in TO_WORKERS else answer(route, payload))

    served.answer = unchecked  # type: ignore[method-assign]
    return served


def asgi_rpc(served: Served, token: str = TOKEN) -> HttpRpc:
    return HttpRpc("http://localhost", token, transport=httpx.ASGITransport(app(served)))


def asgi_engine(served: Served, token: str = TOKEN) -> HttpEngine:
    return HttpEngine("http://localhost", token, transport=httpx.ASGITransport(app(served)))
