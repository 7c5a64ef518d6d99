"""A tool that calls a web service."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from instep.errors import ConfigError
from instep.extras import needed_by
from instep.generation.tools.addresses import InsideError, Reachable, literal
from instep.generation.tools.toolset import ToolDefinition, ToolOutput

SHOWN = 500
"""Characters of a refusal's text that the model is shown."""
TRANSIENT = (429, 500, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
MOST_REDIRECTS = 5
UNPACKED = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""How zlib is told of each encoding."""


class HttpTool:
    """Sends the arguments to `url`, as JSON or with `method="GET"` as a query, and returns the
    text of the answer.

    seconds: for one attempt. retries: further attempts after a time-out, a broken connection or an
        answer that says to come again (429, 5xx), each after a longer pause, or after the one that
        the answer asks for. No call is repeated whose answer says that it is wrong.
    max_bytes: of an answer; the rest is not read.
    allow: addresses and networks within the host's own that may be reached, such as `127.0.0.1` or
        `10.0.0.0/8`. All others are refused: loopback, private, link-local with the metadata of
        clouds, and IPv6 addresses that stand for these. What a name stands for is looked at for
        each connection.
    other_origins: whether redirects are followed to another scheme, host or port, without
    `headers`. Those within the origin are.

    Raises `ConfigError` for a URL that is none over HTTP, or has an address that is not allowed.
    """

    def __init__(
        self,
        definition: ToolDefinition,
        url: str,
        *,
        method: Literal["POST", "GET"] = "POST",
        headers: Mapping[str, str] | None = None,
        seconds: float = 10.0,
        retries: int = 3,
        pause: float = 0.5,
        max_bytes: int = 1 << 20,
        allow: Sequence[str] = (),
        other_origins: bool = False,
    ) -> None:
        with needed_by("an HttpTool"):
            import aiohttp
            from yarl import URL
        self.definition = definition
        self.url = URL(url)
        self.method = method
        self.headers = dict(headers or {})
        self.seconds = seconds
        self.retries = retries
        self.pause = pause
        self.max_bytes = max_bytes
        self.reachable = Reachable(allow)
        self.other_origins = other_origins
        self.broken = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
        self.failed = aiohttp.ClientError
        self.session: Any = None
        host = self.url.host or ""
        if self.url.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is no URL of a web service")
        if (literal(host) and not self.reachable.permits(host)) or (host == "localhost" and not self.reachable.permits("127.0.0.1")):
            step = f'HttpTool(..., allow=("{host if literal(host) else "127.0.0.1"}",)) if the tool is there'
            raise ConfigError(f"{url!r} is within this host's networks, which a tool does not reach", next_step=step)

    def describe(self) -> ToolDefinition:
        return self.definition

    async def execute(self, **arguments: Any) -> ToolOutput:
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt * random.uniform(0.5, 1.0)
            try:
                async with asyncio.timeout(self.seconds):
                    answer = await self._ask(arguments)
            except self.broken as error:
                if isinstance(getattr(error, "os_error", None), InsideError):
                    return ToolOutput(error="the service was not asked: its address is within this host's networks")
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            except self.failed as error:
                return ToolOutput(error=f"{type(error).__name__}: {error}")
            else:
                if answer.status < 300:
                    return ToolOutput(text=answer.text)
                problem = f"status {answer.status}: {answer.text[:SHOWN]}"
                if answer.status not in TRANSIENT:
                    return ToolOutput(error=problem)
                wait = max(wait, min(answer.after, self.seconds))
            if attempt < self.retries:
                await asyncio.sleep(wait)
        return ToolOutput(error=f"no answer after {self.retries + 1} attempts; the last: {problem}")

    async def _ask(self, arguments: dict[str, Any]) -> Answer:
        """Returns the answer after following the redirects that may be followed."""
        url, method, headers = self.url, self.method, self.headers
        query = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in arguments.items()}
        sent = {"params": query} if method == "GET" else {"json": arguments}
        for _ in range(MOST_REDIRECTS + 1):
            answer = await self._once(method, url, headers, sent)
            if answer.status not in REDIRECTS:
                return answer
            try:
                following = url.join(type(url)(answer.location))
                same = following.origin() == url.origin()
            except ValueError:
                return answer._replace(text="a redirect to nowhere")
            if not same and not self.other_origins:
                return answer._replace(text="a redirect to another origin, which is not followed")
            if not same:
                headers = {}
            if answer.status == 303 or (answer.status in (301, 302) and method == "POST"):
                method, sent = "GET", {}
            elif method == "GET":
                sent = {}  # the query, where it is wanted, is in the new location
            url = following
        return answer._replace(text=f"more than {MOST_REDIRECTS} redirects")

    async def _once(self, method: str, url: Any, headers: dict[str, str], sent: dict[str, Any]) -> Answer:
        async with self._session().request(method, url, headers=headers, allow_redirects=False, **sent) as response:
            body = await _read(response.content, self.max_bytes)
            body = _unpacked(body, response.headers.get("Content-Encoding", ""), self.max_bytes)
            after = response.headers.get("Retry-After", "")
            return Answer(
                response.status,
                _text(body, response.charset),
                float(after) if after.isdecimal() else 0.0,
                response.headers.get("Location", ""),
            )

    def _session(self) -> Any:
        """Returns a session without cookies or proxies. It does not decompress answers by
        itself: their size must be bounded first."""
        if self.session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(socket_factory=self.reachable)
            self.session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
            )
        return self.session

    async def aclose(self) -> None:
        """Closes the session's connections."""
        if self.session is not None:
            await self.session.close()
            self.session = None


class Answer(NamedTuple):
    """A service's answer: its status and text, the seconds after which it may be asked again,
    and the location of a redirect."""

    status: int
    text: str
    after: float
    location: str


async def _read(stream: Any, limit: int) -> bytes:
    body = b""
    while len(body) < limit and (part := await stream.read(limit - len(body))):
        body += part
    return body


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    """Returns the first `limit` bytes of the decompressed body; no bytes if it cannot be
    decompressed."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in UNPACKED:
        return b""
    try:
        return zlib.decompressobj(UNPACKED[encoding]).decompress(body, limit)
    except zlib.error:
        return b""


def _text(body: bytes, charset: str | None) -> str:
    try:
        return body.decode(charset or "utf-8", "replace")
    except LookupError:
        return body.decode("utf-8", "replace")
