"""Control routes in memory: who is let in, what is refused, and that nothing which is refused changes anything."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from helpers.asgi import ALLOWED, MSGPACK, ROUTES, TOKEN, asgi_engine, call, client, request, run, served, state
from helpers.toys import attention, described
from msgspec import structs

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http_answer import faults_of
from instep.engine.remote.http_control import BODIES, LARGE, PREFIX, SMALL, TO_WORKERS, Served
from instep.engine.remote.rpc import Outcome
from instep.errors import ConfigError, EngineDirty, SyncError, VersionConflict
from instep.plan.routes import signature
from instep.protocol import CommitRequest, PrepareRequest, TraceRequest, decode, encode

pytestmark = pytest.mark.usefixtures("segments")


# Who is let in.


@pytest.mark.parametrize("route", [*ROUTES, "nothing", ""])
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_without_the_token_every_route_is_closed(route: str, authorization: str | None) -> None:
    at = served()
    headers = {**MSGPACK, **({} if authorization is None else {"authorization": authorization})}
    for method in ("GET", "POST", "DELETE"):
        [answer] = run(at, (route, call(1, request())), headers=headers, method=method)
        assert answer.status_code == 401
        assert TOKEN not in answer.text
    assert at.engine.calls == []  # type: ignore[attr-defined]


def test_a_server_that_is_closed_lets_nobody_in() -> None:
    at = served()
    at.closed = "it has no token"
    [answer] = run(at, ("hello", call(1, request())))
    assert (answer.status_code, answer.json()) == (403, {"error": "it has no token"})


def test_web_pages_are_not_let_in() -> None:
    """A browser on the machine of a server without a token can be made to ask it anything."""
    at = Served(MemoryEngine(attention(0)), None)
    [answer] = run(at, ("pause", call(1, encode(("keep",)))), headers={**MSGPACK, "origin": "https://example.org"})
    assert answer.status_code == 403
    [answer] = run(at, ("hello", call(1, request())), headers=MSGPACK)
    assert answer.status_code == 200


# What is refused.


@pytest.mark.parametrize(
    ("route", "body", "status", "text"),
    [
        ("hello", b"", 400, "not well formed"),
        ("hello", b"\xc1", 400, "not well formed"),
        ("hello", call(1, b"")[:-1], 400, "not well formed"),
        ("hello", b"\x91" * 100_000, 400, "not well formed"),
        ("hello", b"\xdd\xff\xff\xff\xff", 400, "not well formed"),
        ("hello", call(0, request()), 400, ">= 1"),
        ("hello", call(1, request(), name=""), 400, "length"),
        ("hello", call(1, b"junk"), 400, "not well formed"),
        ("hello", call(1, b"\x83\xa3seq\x01\xa7session\xa1s\xa4body" + b"\x91" * 100_000), 400, "RecursionError"),
        ("commit", call(1, request()), 400, "CommitRequest|object"),
        ("commit", call(1, request(CommitRequest("never-prepared"))), 409, "not prepared|left paused"),
        ("trace", call(1, request(TraceRequest([], "wrong"))), 422, "not the one that was signed"),
        ("prepare", call(1, request({"manifest": None})), 400, "not well formed"),
        ("pause", call(1, encode(("now",))), 400, "not well formed"),
        ("label", call(1, encode((None,))), 400, "not well formed"),
        ("score", call(1, encode((["a"],))), 400, "not well formed"),
        ("refuse", call(1, encode(())), 400, "not well formed"),
        ("call", call(1, encode(("explode", b""))), 400, "not well formed"),
        ("__init__", call(1, b""), 404, "unknown method"),
        ("", call(1, b""), 404, "unknown method"),
        ("hello", b"x" * (SMALL + 1), 413, f"at most {SMALL} bytes"),
        ("prepare", b"x" * (LARGE + 1), 413, f"at most {LARGE} bytes"),
        ("commit", b"x" * (LARGE + 1), 413, f"at most {LARGE} bytes"),
    ],
)
def test_malformed_requests_get_a_clear_answer(route: str, body: bytes, status: int, text: str) -> None:
    at = served()
    before = state(at)[:-1]
    [answer] = run(at, (route, body))
    said = answer.json()["error"] if answer.headers["content-type"] == "application/json" else str(_fault(answer.content))
    assert answer.status_code == status
    assert any(part in said for part in text.split("|"))
    assert state(at)[:-1] == before


def _fault(answer: bytes) -> Any:
    return faults_of(answer)[0].message


def test_other_methods_and_content_types_are_refused() -> None:
    at = served()
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        [answer] = run(at, ("hello", call(1, request())), method=method)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    [answer] = run(at, ("hello", call(1, request())), headers={**ALLOWED, "content-type": "application/json"})
    assert answer.status_code == 415


def test_a_length_that_lies_is_found_out() -> None:
    at = served()
    for length, status in (("999999999999999999999", 413), ("-1", 413), ("x", 413)):
        [answer] = run(at, ("hello", call(1, request())), headers={**ALLOWED, "content-length": length})
        assert answer.status_code == status

    async def endless() -> Any:
        while True:
            yield b"x" * (1 << 18)

    async def main() -> int:
        async with client(at) as http:
            return (await http.post(PREFIX + "/hello", content=endless(), headers=ALLOWED)).status_code

    assert asyncio.run(main()) == 413


# What the server says.


def test_people_see_what_is_served() -> None:
    at = served()
    with WeightSync(attention(1), [asgi_engine(at)]) as sync:
        sync.push("v1")
    [answer] = run(at, ("status", b""), method="GET")
    found = answer.json()
    assert (found["state"], found["versions"], found["paused"], found["refuses"], len(found["workers"])) == (
        "serving",
        ["v1"],
        False,
        None,
        1,
    )


def routes(at: Served) -> dict[str, int]:
    async def main() -> dict[str, int]:
        async with client(at) as http:
            answers = {"health": await http.get("/health"), "ping": await http.post("/ping"), "models": await http.get("/v1/models")}
            answers["generate"] = await http.post("/v1/completions", json={})
            return {name: answer.status_code for name, answer in answers.items()}

    return asyncio.run(main())


def test_a_dirty_engine_is_not_healthy_and_does_not_generate() -> None:
    at = served()
    engine: Any = at.engine
    with WeightSync(attention(1), [asgi_engine(at)]) as sync:
        engine.inject("tensor", tensor=1)
        with pytest.raises(SyncError):
            sync.push("v1")
        assert routes(at) == {"health": 503, "ping": 503, "models": 200, "generate": 503}
        with pytest.raises(EngineDirty):
            engine.generate([1], 1)
        sync.push("v2")
        assert routes(at) == {"health": 200, "ping": 200, "models": 200, "generate": 200}


def test_an_engine_whose_trainer_dies_in_a_failed_commit_refuses_by_itself() -> None:
    """The server does not wait for a trainer to say so."""
    at = served()
    engine: Any = at.engine
    weights = attention(1)
    with WeightSync(weights, [asgi_engine(at)]) as sync:
        sync.push("v1")
        assert sync._session.current is not None
        manifest, plan = sync._session.current.manifest, signature(described(weights))
        manifest = structs.replace(manifest, version="v2")
        prepare = request(PrepareRequest(manifest, plan, 60.0, 60.0), seq=1)
        numbered = [("prepare", prepare), ("ready", request(seq=2)), ("pause", encode(("reset",)))]
        run(at, *((route, call(number, payload)) for number, (route, payload) in enumerate(numbered, 1)))
        engine.receivers[0].applier.apply = lambda _: 1 / 0
        [answer] = run(at, ("commit", call(9, request(CommitRequest("v2"), seq=3))))
    assert answer.status_code == 500
    assert "ZeroDivisionError" in str(at.refusal)
    assert routes(at)["health"] == 503
    assert engine.refusal is not None


def test_a_refused_trainer_changes_neither_the_deadline_nor_whose_end_matters() -> None:
    at, weights = served(), attention(1)
    engine: Any = at.engine
    with WeightSync(weights, [asgi_engine(at)], timeout=7) as first, WeightSync(attention(2), [asgi_engine(at)]) as second:
        first.push("v1")
        weights.update(attention(3))
        resume, seen = engine.resume, []

        async def intruded() -> None:
            engine.resume = resume
            before = at.endpoint.timeout, at.endpoint.session, at.trainer
            with pytest.raises(VersionConflict, match="another trainer is pushing 'v2'"):
                await second.apush("others")
            seen.append((before, (at.endpoint.timeout, at.endpoint.session, at.trainer)))
            await resume()

        engine.resume = intruded
        first.push("v2")
    [(before, after)] = seen
    assert before == after
    assert (before[0], engine.version, engine.paused) == (7, "v2", False)


def test_a_server_that_is_not_ready_says_why() -> None:
    at = served()
    at.waiting = "it catches up"
    assert routes(at) == {"health": 503, "ping": 503, "models": 200, "generate": 503}
    [answer] = run(at, ("hello", call(1, request())))
    assert answer.status_code == 200


def test_an_answer_is_an_outcome() -> None:
    [answer] = run(served(), ("hello", call(1, request())))
    assert decode(answer.content, Outcome).fault is None
    assert set(BODIES) <= set(TO_WORKERS)
    assert json.loads(run(served(), ("hello", b""))[0].text)["error"]


def test_a_wrong_token_is_an_error_without_any_token_in_it() -> None:
    at = served()
    with WeightSync(attention(1), [asgi_engine(at, "another-token")]) as sync, pytest.raises(ConfigError, match="INSTEP_TOKEN") as caught:
        sync.push("v1")
    assert TOKEN not in str(caught.value)
    assert "another-token" not in str(caught.value)
