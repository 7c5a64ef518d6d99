"""The HTTP tool against a real server on this machine."""

from __future__ import annotations

import asyncio
import gzip
import socket
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers.rollouts import run

from instep.errors import ConfigError
from instep.generation import ToolDefinition, ToolOutput
from instep.generation.tools.addresses import InsideError, Reachable
from instep.generation.tools.http import HttpTool

DEFINITION = ToolDefinition("search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}})
HERE = ("127.0.0.1",)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """Answers each request with the next of these handlers, and the last one for ever."""

    def __init__(self, *answers: Handler) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            {
                "method": request.method,
                "path": request.path,
                "query": dict(request.query),
                "body": await request.text(),
                "headers": request.headers,
            }
        )
        return await self.answers[min(len(self.asked), len(self.answers)) - 1](request)

    def call(self, arguments: dict[str, Any] | None = None, **settings: Any) -> ToolOutput:
        async def main() -> ToolOutput:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.handle)
            async with TestServer(app) as server:
                tool = HttpTool(DEFINITION, str(server.make_url("/")), **{"pause": 0.001, "allow": HERE, **settings})
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

        patch.setattr("instep.generation.tools.http.asyncio.sleep", sleep)

    with pytest.MonkeyPatch.context() as patch:
        run(main())
        Service(status(429, Retry_After="2"), status(503, Retry_After="900"), status(200)).call(seconds=5.0)
    assert [wait for wait in Clock.waited if wait > 0.1] == [2.0, 5.0]  # no longer than an attempt may take


def test_more_than_the_most_bytes_are_not_read() -> None:
    assert Service(status(200, "y" * 100_000)).call(max_bytes=1000) == ToolOutput(text="y" * 1000)


def test_a_service_that_is_not_there_is_an_error_for_the_model() -> None:
    async def main() -> ToolOutput:
        tool = HttpTool(DEFINITION, "http://127.0.0.1:1/", retries=1, pause=0.001, allow=HERE)
        try:
            return await tool.execute(query="x")
        finally:
            await tool.aclose()

    assert "no answer after 2 attempts; the last: ClientConnectorError" in str(run(main()).error)


SECRET = {"Authorization": "Bearer secret", "X-Api-Key": "secret"}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_redirect_to_another_origin_is_not_followed(code: int, method: str) -> None:
    async def main() -> ToolOutput:
        async with TestServer(web.Application()) as other:
            service.answers = (status(code, Location=str(other.make_url("/latest/meta-data"))),)
            return await asyncio.to_thread(service.call, method=method, headers=SECRET)

    service = Service()
    output = run(main())
    assert str(output.error).startswith(f"status {code}: a redirect to another origin")
    assert len(service.asked) == 1


def test_a_redirect_to_another_origin_takes_no_header_along_where_it_is_followed() -> None:
    other, service = Service(status(200, "found")), Service()

    async def main() -> ToolOutput:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", other.handle)
        async with TestServer(app) as server:
            service.answers = (status(307, Location=str(server.make_url("/b"))),)
            return await asyncio.to_thread(service.call, headers=SECRET, other_origins=True)

    assert run(main()) == ToolOutput(text="found")
    (asked,) = other.asked
    assert (asked["method"], asked["path"], asked["body"]) == ("POST", "/b", '{"query": "x"}')
    assert not set(SECRET) & set(asked["headers"])


def test_a_redirect_within_the_origin_is_followed_as_browsers_do() -> None:
    kept = Service(status(308, Location="/b"), status(200, "found"))
    assert kept.call(headers=SECRET) == ToolOutput(text="found")
    assert [(asked["method"], asked["path"], asked["body"]) for asked in kept.asked] == [
        ("POST", "/", '{"query": "x"}'),
        ("POST", "/b", '{"query": "x"}'),
    ]
    assert kept.asked[1]["headers"]["Authorization"] == SECRET["Authorization"]
    changed = Service(status(302, Location="/b?c=d"), status(200, "found"))
    assert changed.call() == ToolOutput(text="found")
    assert (changed.asked[1]["method"], changed.asked[1]["query"], changed.asked[1]["body"]) == ("GET", {"c": "d"}, "")


@pytest.mark.parametrize("location", ["/again", "", "http://[", "//", "file:///etc/passwd", "gopher://127.0.0.1/"])
def test_a_redirect_without_an_end_is_an_error(location: str) -> None:
    service = Service(status(302, Location=location))
    assert "redirect" in str(service.call().error)
    assert len(service.asked) <= 6


INSIDE = [
    "127.0.0.1", "127.9.9.9", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "0.0.0.0",
    "192.0.0.192", "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:7f00:1",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "::ffff:0:127.0.0.1",
    "2001:0:0:0:0:0:80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_an_address_within_the_hosts_networks_is_refused(address: str) -> None:
    assert not Reachable().permits(address)
    with pytest.raises(InsideError):
        Reachable()((socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 80)))
    host = f"[{address}]" if ":" in address else address
    if "%" not in address:
        with pytest.raises(ConfigError, match="within this host's networks"):
            HttpTool(DEFINITION, f"http://{host}:80/")


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "64:ff9b::101:101", "2002:101:101::1"])
def test_an_address_on_the_internet_may_be_reached(address: str) -> None:
    assert Reachable().permits(address)


def test_networks_are_allowed_one_by_one() -> None:
    allowed = Reachable(("10.0.0.0/8", "::1", "fd00::/8"))
    assert [allowed.permits(address) for address in ("10.1.2.3", "::1", "fd00::1", "::ffff:10.0.0.1")] == [True] * 4
    assert [allowed.permits(address) for address in ("127.0.0.1", "192.168.0.1", "::2", "169.254.169.254")] == [False] * 4
    with pytest.raises(ConfigError, match="allow takes addresses"):
        HttpTool(DEFINITION, "http://example.com", allow=("everything",))


@pytest.mark.parametrize("name", ["inside.example", "127.1", "0x7f.1", "2130706433"])
def test_a_name_that_stands_for_an_address_within_is_refused_when_it_is_connected_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(status(200, "secret"))
    real = socket.getaddrinfo

    def rebound(host: Any, *given: Any, **named: Any) -> Any:
        return real("127.0.0.1" if host == "inside.example" else host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", rebound)

    async def main() -> ToolOutput:
        app = web.Application()
        app.router.add_route("*", "/", service.handle)
        async with TestServer(app) as server:
            tool = HttpTool(DEFINITION, f"http://{name}:{server.port}/", pause=0.001)
            try:
                return await tool.execute(query="x")
            finally:
                await tool.aclose()

    assert any(reason in str(run(main()).error) for reason in ("within this host's networks", "not a canonical IPv4 address"))
    assert service.asked == []


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "file:///etc/passwd", "http://localhost/", "ftp://example.com"])
def test_a_url_that_is_none_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpTool(DEFINITION, url)


def test_no_more_is_unpacked_than_is_shown() -> None:
    def packed(body: bytes, encoding: str) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            return web.Response(body=body, headers={"Content-Encoding": encoding, "Content-Type": "text/plain"})

        return handler

    bomb = gzip.compress(bytes(50 << 20))
    tracemalloc.start()
    assert Service(packed(bomb, "gzip")).call(max_bytes=1000) == ToolOutput(text="\0" * 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
    assert Service(packed(gzip.compress(b"found"), "gzip")).call() == ToolOutput(text="found")
    assert Service(packed(zlib.compress(b"found"), "deflate")).call() == ToolOutput(text="found")
    assert Service(packed(b"junk", "gzip")).call() == ToolOutput(text="")


def test_an_answer_in_no_known_character_set_is_read_as_utf8() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body="ü".encode(), headers={"Content-Type": "text/plain; charset=nonsense"})

    assert Service(handler).call() == ToolOutput(text="ü")
