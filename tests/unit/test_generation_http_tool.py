"""The HTTP tool against a real server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollouts import run

from instep.generation import ToolDefinition, ToolOutput
from instep.generation.http_tool import HttpTool

DEFINITION = ToolDefinition("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """Answers each request with the next of these handlers, and the last one for ever."""

    def __init__(self, *answers: Handler) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            {"method": request.method, "query": dict(request.query), "body": await request.text(), "headers": request.headers}
        )
        return await self.answers[min(len(self.asked), len(self.answers)) - 1](request)

    def call(self, arguments: dict[str, Any] | None = None, **settings: Any) -> ToolOutput:
        async def main() -> ToolOutput:
            app = web.Application()
            app.router.add_route("*", "/", self.handle)
            async with TestServer(app) as server:
                tool = HttpTool(DEFINITION, str(server.make_url("/")), **{"pause": 0.001, **settings})
                try:
                    return await tool.execute(**(arguments or {"query": "x"}))
                finally:
                    await tool.aclose()

        return run(main())


def status(code: int, text: str = "", **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=code, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return handler


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError


async def breaks_off(request: web.Request) -> web.Response:
    assert request.transport
    request.transport.abort()
    return web.Response()


def test_arguments_are_posted_as_json_and_the_text_comes_back() -> None:
    service = Service(status(200, "found"))
    assert service.call({"query": "ü", "most": 3}, headers={"Authorization": "Bearer k"}) == ToolOutput(text="found")
    (asked,) = service.asked
    assert (asked["method"], asked["body"]) == ("POST", '{"query": "\\u00fc", "most": 3}')
    assert (asked["headers"]["Authorization"], asked["headers"]["Content-Type"]) == ("Bearer k", "application/json")


def test_with_get_arguments_are_the_query() -> None:
    service = Service(status(200))
    service.call({"query": "a b", "exact": True, "most": 3}, method="GET")
    assert (service.asked[0]["method"], service.asked[0]["query"]) == ("GET", {"query": "a b", "exact": "true", "most": "3"})


@pytest.mark.parametrize("trouble", [status(429), status(500), status(503), breaks_off])
def test_what_may_pass_is_tried_again(trouble: Handler) -> None:
    service = Service(trouble, trouble, status(200, "found"))
    assert service.call() == ToolOutput(text="found")
    assert len(service.asked) == 3


def test_a_hanging_service_is_given_up_after_its_attempts() -> None:
    service = Service(hangs)
    assert "no answer after 2 attempts; the last: TimeoutError" in str(service.call(seconds=0.05, retries=1).error)
    assert len(service.asked) == 2


def test_no_more_attempts_are_made_than_allowed() -> None:
    service = Service(status(503, "busy"))
    assert service.call(retries=2).error == "no answer after 3 attempts; the last: status 503: busy"
    assert len(service.asked) == 3


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_call_that_is_wrong_is_not_repeated_and_the_model_is_told_why(code: int) -> None:
    service = Service(status(code, "no such city" + "!" * 10_000))
    error = str(service.call().error)
    assert error.startswith(f"status {code}: no such city")
    assert (len(service.asked), len(error) < 600) == (1, True)


def test_a_service_that_asks_for_a_pause_gets_it() -> None:
    class Clock:
        waited: list[float] = []  # noqa: RUF012

    async def main() -> None:
        real = asyncio.sleep

        async def sleep(seconds: float) -> None:
            Clock.waited.append(seconds)
            await real(0)

        patch.setattr("instep.generation.http_tool.asyncio.sleep", sleep)

    with pytest.MonkeyPatch.context() as patch:
        run(main())
        Service(status(429, Retry_After="2"), status(503, Retry_After="900"), status(200)).call(seconds=5.0)
    assert [wait for wait in Clock.waited if wait > 0.1] == [2.0, 5.0]  # no longer than an attempt may take


def test_more_than_the_most_bytes_are_not_read() -> None:
    assert Service(status(200, "y" * 100_000)).call(max_bytes=1000) == ToolOutput(text="y" * 1000)


def test_a_service_that_is_not_there_is_an_error_for_the_model() -> None:
    async def main() -> ToolOutput:
        tool = HttpTool(DEFINITION, "http://127.0.0.1:1/", retries=1, pause=0.001)
        try:
            return await tool.execute(query="x")
        finally:
            await tool.aclose()

    assert "no answer after 2 attempts; the last: ClientConnectorError" in str(run(main()).error)
