"""Engines behind an HTTP server, by their URL: `WeightSync(source, engines=["http://gpu1:8000"])`.

The server is `instep serve`, or any that has the routes of `http_control.py`. Weights do not travel
here, but by a push's transport.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from functools import cache
from typing import Any

import msgspec

from instep.engine import Engine
from instep.engine.remote.http_control import LARGE, MSGPACK, PREFIX, TO_WORKERS, Call
from instep.engine.remote.http_token import SET_IT, checked, token_of, turned_away
from instep.engine.remote.http_url import place
from instep.engine.remote.loop_thread import LoopThread
from instep.engine.remote.rpc import RemoteEngine
from instep.errors import ConfigError, EngineLost
from instep.extras import needed_by
from instep.protocol import decode, encode

REPEATABLE = ("hello", "trace", "decide", "prepare", "ready", "accept", "status", "abort", "digest")
"""What may be done twice. Anything else is sent again only to ask what came of it: the server then
runs nothing that it has not seen."""
ASKING = ("hello", "status", "score")
TOO_LONG = f"let {LARGE >> 20} MiB pass where the limit is, such as nginx's client_max_body_size: a request lists every tensor"
ATTEMPTS, AGAIN = 3, 0.1  # seconds before the second attempt; three times as long before the third
CONNECT = 5.0  # seconds
KEPT = 2.0  # seconds that an idle connection is kept: servers close theirs after 5, and a request must not meet that


def adapt(obj: Any) -> Engine | None:
    """Returns an engine for a URL; None for an object that is no string."""
    return HttpEngine(obj) if isinstance(obj, str) else None


class HttpEngine(RemoteEngine):
    """An engine behind an HTTP server.

    url: such as `http://gpu1:8000`, `https://inference.example/model-a` or `http://[fd00::1]:8000`.
    token: the server's; if None, `http_token.token_of` finds it.

    Raises `ConfigError` for a URL that is none or holds a password, and where httpx is not
    installed.
    """

    def __init__(self, url: str, token: str | None = None, **options: Any) -> None:
        super().__init__(HttpRpc(url, token, **options))


class HttpRpc:
    """Sends requests to one server with httpx. Proxies come from the environment as usual
    (`HTTPS_PROXY`, `NO_PROXY`), but the loopback has none.

    transport: httpx's way to the server, for tests.
    """

    def __init__(self, url: str, token: str | None = None, *, transport: Any = None) -> None:
        with needed_by("an engine's URL"):
            import httpx
        url, self.name, local = place(url)
        token = checked(token) if token else token_of()
        self.client = httpx.AsyncClient(
            base_url=url + PREFIX,
            headers={"content-type": MSGPACK.decode(), **({"authorization": f"Bearer {token}"} if token else {})},
            timeout=httpx.Timeout(None, connect=CONNECT),  # how long an answer may take is the caller's affair
            limits=httpx.Limits(keepalive_expiry=KEPT),
            trust_env=not local,
            transport=transport,
        )
        self.failures = httpx.TransportError
        self.id, self.numbers = uuid.uuid4().hex, itertools.count(1)

    async def call(self, method: str, payload: bytes) -> bytes:
        return await asyncio.wrap_future(_loop().run(self._call(method, payload)))

    async def _call(self, method: str, payload: bytes) -> bytes:
        route, payload = _flat(method, payload)
        number, problem = next(self.numbers), ""
        for attempt in range(ATTEMPTS):
            body = encode(Call(self.id, number, attempt > 0 and route not in REPEATABLE, payload))
            try:
                response = await self.client.post(f"/{route}", content=body)
            except self.failures as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                await asyncio.sleep(AGAIN * 3**attempt)
            else:
                return self._answer(route, response)
        raise EngineLost(f"{self.name} cannot be reached: {problem}")

    def _answer(self, route: str, response: Any) -> bytes:
        """Returns the engine's answer. Raises `ConfigError` if the server refuses a question's
        token or route, or a request's size. Any other answer that is not the engine's is an
        `EngineLost`."""
        if response.headers.get("content-type") == MSGPACK.decode():
            answer: bytes = response.content
            return answer
        status, text = response.status_code, _message(response)
        if status == 401:
            kind = ConfigError if route in ASKING else EngineLost  # it may be another server by now
            told = turned_away("authorization" in self.client.headers)
            raise kind(f"{self.name} {told} (401: {text})", next_step=SET_IT)
        if status == 413:  # from a proxy or the server, which has done nothing then
            size = len(response.request.content)
            told = f"{self.name} does not take {route}, {size} bytes, as too long (413: {text})"
            raise ConfigError(told, next_step=TOO_LONG)
        text = f"{self.name} answered {route} with {status}: {text}"
        if route not in ASKING or status not in (403, 404, 405):
            raise EngineLost(text)
        raise ConfigError(text, next_step=None if status == 403 else "start the server with `instep serve`")


@cache
def _loop() -> LoopThread:
    """Returns the event loop of all connections: they outlive the loops of those who push."""
    return LoopThread("instep-http")


os.register_at_fork(after_in_child=_loop.cache_clear)  # its thread is not in a child


def _flat(method: str, payload: bytes) -> tuple[str, bytes]:
    """Returns the route and the body of a request. A call to the workers has the route of the
    workers' method."""
    if method == "call":
        try:
            inner, data = decode(payload, tuple[str, bytes])
        except msgspec.DecodeError:
            return method, payload
        if inner in TO_WORKERS:
            return inner, data
    return method, payload


def _message(response: Any) -> str:
    """Returns the text of an answer in JSON or plain text, on one line."""
    try:
        text = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        text = response.text
    return " ".join(str(text).split())[:300]
