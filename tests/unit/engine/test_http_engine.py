"""Engines by their URL: which URLs, which token, which proxy, and what is sent again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.asgi import TOKEN, app, asgi_engine, served
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine import connect
from instep.engine.remote import http, http_control, http_token
from instep.engine.remote.http import HttpEngine, HttpRpc
from instep.engine.remote.http_control import PREFIX, Served
from instep.engine.remote.http_token import is_loopback, take_token, token_of
from instep.errors import ConfigError, EngineLost, InstepError

pytestmark = pytest.mark.usefixtures("segments")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "AGAIN", 0.001)
    for name in (http_token.VARIABLE, http_token.FILE, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://gpu1:8000", "gpu1:8000"),
        ("http://gpu1:8000/", "gpu1:8000"),
        ("https://inference.example/model-a", "inference.example/model-a"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("gpu1:8000", "gpu1:8000"),
        ("127.0.0.1:8000/", "127.0.0.1:8000"),
        ("[fd00::1]:8000", "[fd00::1]:8000"),
        ("inference.example:80/model-a", "inference.example:80/model-a"),
    ],
)
def test_a_url_is_an_engine(url: str, name: str) -> None:
    engine = connect(url)
    assert isinstance(engine, HttpEngine)
    assert engine.name == name
    rpc: Any = engine.rpc
    scheme = "https" if url.startswith("https") else "http"
    assert str(rpc.client.base_url) == f"{scheme}://{name}{PREFIX}/".replace(":80/", "/")  # the scheme's own port goes without saying


@pytest.mark.parametrize(
    "url",
    ["gpu1", "gpu1:99999", "", "ftp://gpu1", "http://", "http://gpu1:port", "http://gpu1:99999", "http://gpu1/?x=1", "http://[::1"],
)
def test_anything_else_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="an engine's URL"):
        connect(url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="must not hold a password") as caught:
        connect("http://me:geheim@gpu1:8000")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST.", "127.0.0.1", "127.8.9.1", "::1", "[::1]")),
        *((host, False) for host in ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "gpu1")),
    ],
)
def test_which_hosts_are_this_machine(host: str, here: bool) -> None:
    assert is_loopback(host) is here


def test_a_proxy_is_taken_from_the_environment_but_never_for_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")

    def proxied(url: str) -> bool:
        client: Any = HttpRpc(url).client
        return client._transport_for_url(httpx.URL(url)) is not client._transport

    assert proxied("http://gpu1:8000")
    assert not proxied("http://127.0.0.1:8000")
    assert not proxied("http://[::1]:8000")
    monkeypatch.setenv("NO_PROXY", "gpu1")
    assert not proxied("http://gpu1:8000")


# The token.


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  in-a-file-1\n")
    assert token_of({}) is None
    assert token_of({"INSTEP_TOKEN": "in-a-variable"}) == "in-a-variable"
    assert token_of({"INSTEP_TOKEN_FILE": str(file)}) == "in-a-file-1"


@pytest.mark.parametrize("bad", ["short", "with space", "ünbekannt", "x" * 600, "line\nbreak"])
def test_a_token_that_cannot_be_used_is_not_in_the_error(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(bad)
    for environment in ({"INSTEP_TOKEN": bad}, {"INSTEP_TOKEN_FILE": str(file)}):
        with pytest.raises(ConfigError, match="printable ASCII") as caught:
            token_of(environment)
        assert bad not in str(caught.value)


@pytest.mark.parametrize("files", [{}, {"token": ""}])
def test_a_missing_or_empty_file_is_a_mistake(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        token_of({"INSTEP_TOKEN_FILE": str(tmp_path / "token")})
    with pytest.raises(ConfigError, match="both"):
        token_of({"INSTEP_TOKEN_FILE": str(tmp_path / "token"), "INSTEP_TOKEN": "in-a-variable"})


def test_children_do_not_inherit_a_token_that_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_token, "_taken", None)
    monkeypatch.setenv("INSTEP_TOKEN", "in-a-variable")
    assert take_token() == "in-a-variable"
    assert "INSTEP_TOKEN" not in os.environ
    assert token_of() == "in-a-variable"


# What is sent again.


class Broken(httpx.AsyncBaseTransport):
    """Loses the first answers to some routes: before the request arrives, or after it has run."""

    def __init__(self, inner: httpx.AsyncBaseTransport, route: str, after: bool, times: int) -> None:
        self.inner, self.route, self.after, self.times = inner, route, after, times

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/" + self.route) and self.times:
            self.times -= 1
            if self.after:
                await self.inner.handle_async_request(request)
            raise httpx.ReadError("the cable")
        return await self.inner.handle_async_request(request)


@pytest.mark.parametrize("route", ["hello", "trace", "prepare", "ready", "pause", "commit", "label", "resume", "refuse"])
def test_an_answer_that_was_lost_is_asked_for_and_nothing_runs_twice(route: str) -> None:
    at = served()
    engine = HttpEngine("http://localhost", TOKEN, transport=Broken(httpx.ASGITransport(app(at)), route, after=True, times=1))
    with WeightSync(attention(1), [engine]) as sync:
        sync.push("v1")
    memory: Any = at.engine
    assert memory.fingerprint() == MemoryEngine(attention(1)).fingerprint()
    assert (memory.version, memory.paused) == ("v1", False)
    assert route == "ready" or memory.calls.count(route) <= 1


@pytest.mark.parametrize("route", ["pause", "commit", "label"])
def test_a_step_that_did_not_arrive_is_not_taken_on_a_second_try(route: str) -> None:
    """The server would have to take its word that the first one was lost."""
    at = served()
    engine = HttpEngine("http://localhost", TOKEN, transport=Broken(httpx.ASGITransport(app(at)), route, after=False, times=1))
    with WeightSync(attention(1), [engine]) as sync:
        with pytest.raises(EngineLost, match="nothing was done"):
            sync.push("v1")
        sync.push("v2")
    memory: Any = at.engine
    assert (memory.version, memory.paused, memory.refusal) == ("v2", False, None)


def test_a_server_that_is_not_there_is_lost() -> None:
    engine = HttpEngine("http://127.0.0.1:9", TOKEN)
    with pytest.raises(EngineLost, match=r"127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(engine.call("hello", b""))


@pytest.mark.parametrize(
    ("status", "method", "error"),
    [
        (404, "hello", ConfigError),
        (404, "commit", EngineLost),
        (502, "hello", EngineLost),
        (200, "hello", EngineLost),
        (403, "hello", ConfigError),
    ],
)
def test_a_server_without_such_routes(status: int, method: Any, error: type[Exception]) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text="<html>" + "x" * 10_000))
    engine = HttpEngine("http://gpu1", TOKEN, transport=transport)
    with pytest.raises(error, match=f"gpu1 answered {method} with {status}") as caught:
        asyncio.run(engine.call(method, b""))
    assert len(str(caught.value)) < 600


class Measured(httpx.AsyncBaseTransport):
    """What each route's requests and answers measure. Those to `refused` are too long for a proxy on the way."""

    refused = ""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner, self.sizes, self.answers = inner, dict[str, int](), dict[str, int]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.rpartition("/")[2]
        self.sizes[route] = max(len(request.content), self.sizes.get(route, 0))
        if route == self.refused:
            return httpx.Response(413, text="<html>Request Entity Too Large", request=request)
        answer = await self.inner.handle_async_request(request)
        self.answers[route] = max(len(await answer.aread()), self.answers.get(route, 0))
        return answer


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "count", [2_000, pytest.param(20_000, marks=pytest.mark.program), pytest.param(100_000, marks=pytest.mark.program)]
)
def test_a_push_of_very_many_tensors_over_http(count: int, tp: int) -> None:
    """One request has the list of tensors: a later one names it. Digests take eight bytes a tensor, and all else less than two
    kilobytes, whatever their number is."""
    source = {f"model.layers.0.mlp.experts.{index}.down_proj.weight": torch.full((2, 8), float(index)) for index in range(count)}
    at = Served(MemoryEngine({name: torch.zeros(2, 8) for name in source}, tp=tp), TOKEN)
    way = Measured(httpx.ASGITransport(app(at)))
    with WeightSync(source, [HttpEngine("http://localhost", TOKEN, transport=way)], timeout=250) as sync:
        assert sync.push("v1").tensors == count
        assert max(way.sizes.values()) == way.sizes.pop("trace") <= http_control.LARGE
        assert way.answers.pop("trace") <= http_control.LARGE
        for tensor in source.values():
            tensor.add_(1)
        sync.push("v2")
    assert 8 * count < way.sizes.pop("prepare") < 8 * count + 2048
    assert max(way.sizes.values()) < 2048
    assert max(way.answers.values()) < 8 * count * tp + 2048
    assert at.engine.fingerprint() == MemoryEngine(source, tp=tp).fingerprint()  # type: ignore[attr-defined]


@pytest.mark.parametrize("route", ["trace", "prepare", "commit"])
def test_a_request_that_a_proxy_finds_too_long_is_told_as_that(route: str) -> None:
    at = served()
    way = Measured(httpx.ASGITransport(app(at)))
    way.refused = route
    with WeightSync(attention(1), [HttpEngine("http://localhost", TOKEN, transport=way)]) as sync:
        with pytest.raises(InstepError, match=rf"localhost does not take {route}, \d+ bytes, as too long") as caught:
            sync.push("v1")
        assert not isinstance(caught.value, EngineLost)
        assert "client_max_body_size" in str(caught.value)
        assert [(state.serving, state.version) for state in sync.status()] == [("old", None)]
        engine: Any = at.engine
        assert (engine.paused, engine.refusal, engine.fingerprint()) == (False, None, MemoryEngine(attention(0)).fingerprint())
        way.refused = ""
        sync.push("v2")
    assert engine.version == "v2"


def test_a_redirect_is_not_followed() -> None:
    """It would carry the token to another server."""
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://elsewhere.example/"})

    with pytest.raises(EngineLost):
        asyncio.run(HttpEngine("http://gpu1", TOKEN, transport=httpx.MockTransport(answer)).call("hello", b""))
    assert asked == ["gpu1"]


def test_pushes_on_one_event_loop_after_the_other() -> None:
    at = served()
    weights = attention(1)
    with WeightSync(weights, [asgi_engine(at)]) as sync:
        for version in "abc":
            sync.push(version)
    assert at.engine.version == "c"  # type: ignore[attr-defined]
