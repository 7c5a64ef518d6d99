"""An engine's control routes without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from helpers.toys import attention
from instep import MemoryEngine
from instep.engine.remote.asgi import Receive, Scope, Send
from instep.engine.remote.http import HttpEngine, HttpRpc
from instep.engine.remote.http_control import PREFIX, TO_WORKERS, Call, Control, Served
from instep.engine.remote.rpc import ARGUMENTS, Answer
from instep.protocol import Request, encode, raw

TOKEN = "token-of-the-tests"


ROUTES = (*TO_WORKERS, *(method for method in ARGUMENTS if method != "call"))
MSGPACK = {"content-type": "application/msgpack"}
ALLOWED = {"authorization": f"Bearer {TOKEN}", **MSGPACK}


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


def client(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app(served)), base_url="http://server")


def served(seed: int = 0) -> Served:
    return Served(MemoryEngine(attention(seed)), TOKEN)


def state(at: Served) -> Any:
    """All that a request could change."""
    engine: Any = at.engine
    receivers = [(r.state, r.version, r.signature, r.prepared, r.last_error, dict(r.history)) for r in engine.receivers]
    return engine.fingerprint(), engine.version, engine.paused, engine.refusal, at.refusal, receivers


def run(at: Served, *requests: tuple[str, bytes], headers: dict[str, str] = ALLOWED, method: str = "POST") -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with client(at) as http:
            return [await http.request(method, PREFIX + "/" + route, content=body, headers=headers) for route, body in requests]

    return asyncio.run(main())


def call(number: int, payload: bytes = b"", *, name: str = "client", again: bool = False) -> bytes:
    return encode(Call(name, number, again, payload))


def request(body: Any = None, seq: int = 1) -> bytes:
    return encode(Request(seq, "session", raw(body)))
