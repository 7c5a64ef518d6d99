"""A tool that is a web service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

from instep.extras import needed_by
from instep.generation.tools import ToolDefinition, ToolOutput

SHOWN = 500
"""Characters of a refusal's text that the model is shown."""
TRANSIENT = (429, 500, 502, 503, 504)


class HttpTool:
    """Sends the arguments to `url`, as JSON or with `method="GET"` as a query, and gives the text of the answer.

    seconds: for one attempt. retries: further attempts after a time-out, a broken connection or an answer that says to come again (429,
        5xx), each after a longer pause, or after the one that the answer asks for. No call is repeated whose answer says that it is wrong.
    max_bytes: of an answer; the rest is not read.
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
    ) -> None:
        with needed_by("an HttpTool"):
            import aiohttp
        self.definition = definition
        self.url = url
        self.method = method
        self.headers = dict(headers or {})
        self.seconds = seconds
        self.retries = retries
        self.pause = pause
        self.max_bytes = max_bytes
        self.broken = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
        self.session: Any = None

    def describe(self) -> ToolDefinition:
        return self.definition

    async def execute(self, **arguments: Any) -> ToolOutput:
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt * random.uniform(0.5, 1.0)
            try:
                async with asyncio.timeout(self.seconds):
                    status, text, asked = await self._ask(arguments)
            except self.broken as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if status < 400:
                    return ToolOutput(text=text)
                problem = f"status {status}: {text[:SHOWN]}"
                if status not in TRANSIENT:
                    return ToolOutput(error=problem)
                wait = max(wait, min(asked, self.seconds))
            if attempt < self.retries:
                await asyncio.sleep(wait)
        return ToolOutput(error=f"no answer after {self.retries + 1} attempts; the last: {problem}")

    async def _ask(self, arguments: dict[str, Any]) -> tuple[int, str, float]:
        """Status, text, and the seconds after which the service wants to be asked again."""
        if self.session is None:
            import aiohttp

            self.session = aiohttp.ClientSession(headers=self.headers)
        sent = {"params": _query(arguments)} if self.method == "GET" else {"json": arguments}
        async with self.session.request(self.method, self.url, **sent) as response:
            body = await _read(response.content, self.max_bytes)
            after = response.headers.get("Retry-After", "")
            return response.status, body.decode(response.charset or "utf-8", "replace"), float(after) if after.isdecimal() else 0.0

    async def aclose(self) -> None:
        """Closes its connections."""
        if self.session is not None:
            await self.session.close()
            self.session = None


def _query(arguments: dict[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in arguments.items()}


async def _read(stream: Any, limit: int) -> bytes:
    body = b""
    while len(body) < limit and (part := await stream.read(limit - len(body))):
        body += part
    return body
