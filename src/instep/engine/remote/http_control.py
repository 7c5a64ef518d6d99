"""An engine's control routes over HTTP, and what an inference server says while its engine must not
generate.

    POST /instep/v1/{hello,trace,prepare,ready,commit,accept,abort,status,digest}   to the workers
    POST /instep/v1/{pause,resume,label,score,refuse}                 to the engine
    GET  /instep/v1/status                                            the same for people, in JSON

A body is a msgpack `Call`, an answer an `Outcome` (see `rpc.py`) with a status that says what it
is. A request that does not get as far as the engine is answered in JSON. Nothing is unpickled, and
nothing is read before the token was seen. `Control` is an ASGI middleware: it knows no web
framework and no engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Annotated, Any, get_args

import msgspec

from instep.engine import Engine
from instep.engine.remote.answers import told
from instep.engine.remote.asgi import App, Receive, Scope, Send
from instep.engine.remote.http_answer import dirty_reason, status_of
from instep.engine.remote.http_once import Once, Stale
from instep.engine.remote.http_token import refusal
from instep.engine.remote.observed import Observed
from instep.engine.remote.rpc import ARGUMENTS, GONE, Endpoint
from instep.errors import InstepError
from instep.metrics import Metrics
from instep.protocol import (
    CommitRequest,
    Identity,
    Method,
    PrepareRequest,
    Reply,
    Request,
    TraceRequest,
    decode,
    encode,
)
from instep.readback import DigestRequest

PREFIX = "/instep/v1"
MSGPACK = b"application/msgpack"
HEALTH = ("/health", "/ping")
TO_WORKERS: tuple[str, ...] = get_args(Method)
BODIES: dict[str, Any] = {"trace": TraceRequest, "prepare": PrepareRequest, "commit": CommitRequest, "accept": str, "digest": DigestRequest}
LARGE, SMALL = 64 << 20, 1 << 20  # bytes: of a list of all tensors, of any other body
PATIENCE = 30.0  # seconds for a body to arrive
SHORT, LONG = 5.0, 3600.0  # seconds that a request may take, and a paused engine is left alone, whatever its trainer says
GRACE = 1.0  # seconds in which a trainer whose connection ended may come back

logger = logging.getLogger("instep")


class Call(msgspec.Struct, frozen=True):
    """One request of a trainer. number: the client's own count, by which `Once` recognises a
    repeated request."""

    client: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    again: bool
    payload: bytes


class Refused(Exception):
    """A request that is answered before it reaches the engine, with this HTTP status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Served:
    """One engine behind a server. token: None if no caller needs one, because the server listens
    on the loopback alone. metrics: counts pushes, their phases and their bytes."""

    def __init__(self, engine: Engine, token: str | None, timeout: float = 60.0, metrics: Metrics | None = None) -> None:
        self.engine, self.token, self.seen = engine, token, Observed(engine, metrics)
        self.endpoint = Endpoint(self.seen, timeout)
        self.once = Once()
        self.trainer: str | None = None
        """The client that last had a version prepared: the one whose end matters."""
        self.waiting: str | None = None
        """Why it is not ready yet."""
        self.closed: str | None = None
        """Why it takes no control requests at all."""
        self.tells = False
        """Whether the engine notes which versions make an answer (see `answers.py`)."""

    @property
    def refusal(self) -> str | None:
        """Why the engine must not generate now, or None."""
        return self.endpoint.refusal or self.waiting

    async def answer(self, route: str, payload: bytes) -> bytes:
        """Returns the engine's answer to a well-formed request. Raises `Refused` for another
        one."""
        method, payload = ("call", encode((route, payload))) if route in TO_WORKERS else (route, payload)
        if method not in ARGUMENTS:
            raise Refused(404, f"unknown method {route!r}")
        arguments, seconds = _well_formed(payload, ARGUMENTS[method]), None
        if method == "call":
            inner = _well_formed(arguments[1], Request)
            body = _well_formed(inner.body, BODIES.get(arguments[0], Any))
            if isinstance(body, TraceRequest) or arguments[0] == "decide":
                seconds = LONG  # nothing is paused, and the trainer has a deadline of its own
            elif isinstance(body, PrepareRequest):
                seconds = min(max(SHORT, body.timeout), LONG)  # a trainer that is silent for longer has left
        answer = await self.endpoint.answer(method, payload, seconds)
        if method == "call" and arguments[0] == "commit" and (dirty := dirty_reason(answer)):
            await self.endpoint.answer("refuse", encode((dirty,)))  # its trainer may not live to say it
        return answer

    async def status(self) -> dict[str, Any]:
        """Returns what the engine does, for people. This request is no sign of life of a
        trainer."""
        request = encode(Request(0, ""))
        async with asyncio.timeout(self.endpoint.timeout):
            replies = [decode(data, Reply) for data in await self.engine.call("status", request)]
        return {
            "engine": self.engine.name,
            "state": "dirty" if self.endpoint.refusal or any(reply.state != "serving" for reply in replies) else "serving",
            "versions": sorted({reply.version or "" for reply in replies}),
            "paused": self.endpoint.paused,
            "refuses": self.refusal,
            "lag": len(self.seen.lag),
            "last_pause": self.seen.last_pause,
            "workers": [msgspec.to_builtins(decode(reply.body, Identity)) for reply in replies if reply.fault is None],
        }


class Control:
    """An ASGI middleware with the control routes. app: the inference server. served: gives the
    engine for a request's scope, or None before there is one."""

    def __init__(self, app: App, served: Callable[[Scope], Served | None]) -> None:
        self.app, self.served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (served := self.served(scope)) is None:
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == PREFIX or path.startswith(PREFIX + "/"):
            return await self._control(served, path.removeprefix(PREFIX).strip("/"), scope, receive, send)
        asked = path in HEALTH or scope["type"] == "websocket" or scope["method"] == "POST"
        if asked and (reason := served.refusal) is not None:
            return await _unavailable(reason, scope, receive, send)
        if served.tells and scope["type"] == "http" and scope["method"] == "POST":
            return await told(self.app, scope, receive, send)
        return await self.app(scope, receive, send)

    async def _control(self, served: Served, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            headers = dict(scope["headers"])
            _admit(served, headers)
            if scope["method"] == "GET" and route == "status":
                return await _send(send, 200, b"application/json", _json(await served.status()))
            if scope["method"] != "POST":
                raise Refused(405, f"{scope['method']} {route}: control requests are POST", allow="POST")
            call = await _read(route, headers, receive)
            task = _started(served, route, call, scope)
            answer = await _watched(served, call, task, receive)
            await _send(send, status_of(answer), MSGPACK, answer)
        except Refused as refused:
            await _send(send, refused.status, b"application/json", _json({"error": str(refused)}), refused.headers)
        except Exception as error:
            text = str(error.args[0]) if isinstance(error, InstepError) else f"{type(error).__name__}: {error}"
            await _send(send, 503, b"application/json", _json({"error": text}))


def _started(served: Served, route: str, call: Call, scope: Scope) -> asyncio.Task[bytes]:
    host, _ = scope.get("client") or ("", 0)  # there is none behind a Unix socket

    async def answered() -> bytes:
        answer = await served.answer(route, call.payload)
        if route == "prepare" and decode(call.payload, Request).session == served.endpoint.session:
            served.trainer, served.seen.by = call.client, f"trainer {call.client[:8]}" + f" at {host}" * bool(host)
        return answer

    try:
        return served.once.run(call.client, call.number, route, again=call.again, action=answered)
    except Stale as stale:
        raise Refused(409, str(stale)) from None


def _admit(served: Served, headers: dict[bytes, bytes]) -> None:
    if served.closed is not None:
        raise Refused(403, served.closed)
    if served.token is not None and (why := refusal(headers.get(b"authorization", b""), served.token)):
        raise Refused(401, why, **{"www-authenticate": "Bearer"})
    if b"origin" in headers:  # a web page in somebody's browser, which reaches the loopback too
        raise Refused(403, "instep's routes are not for web pages")


async def _read(route: str, headers: dict[bytes, bytes], receive: Receive) -> Call:
    if headers.get(b"content-type", b"").partition(b";")[0].strip() != MSGPACK:
        raise Refused(415, f"a body is {MSGPACK.decode()}")
    limit = LARGE if route in BODIES else SMALL
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length[:20]) > limit:
        raise Refused(413, f"{route} takes at most {limit} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the connection ended within the body")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise Refused(413, f"{route} takes at most {limit} bytes")
                if not message.get("more_body", False):
                    call: Call = _well_formed(bytes(body), Call)
                    return call
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {PATIENCE:g} s") from None


def _well_formed(data: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not well formed: {type(error).__name__}: {error}") from None


async def _watched(served: Served, call: Call, task: asyncio.Task[bytes], receive: Receive) -> bytes:
    """Returns the answer. If the connection ends first and its client does not come back, the
    trainer counts as gone."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait((task,))
            await asyncio.sleep(GRACE)
            if call.client == served.trainer and call.number == served.once.latest(call.client):
                logger.warning("%s: the trainer's connection ended within a request", served.engine.name)
                await served.endpoint.answer(GONE, b"")
        return task.result()
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await gone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unavailable(reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        return await send({"type": "websocket.close", "code": 1013, "reason": "the engine refuses to generate"})
    error = {"message": f"the engine refuses to generate: {reason}", "type": "ServiceUnavailableError", "code": 503}
    return await _send(send, 503, b"application/json", _json({"error": error}))


async def _send(send: Send, status: int, kind: bytes, body: bytes, headers: MutableMapping[str, str] | None = None) -> None:
    extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    fields = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store"), *extra]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
