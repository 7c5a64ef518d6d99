"""Requests that are sent again, replayed, or cut off."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from helpers.asgi import ALLOWED, app, asgi_engine, call, request, run, served, state
from helpers.toys import attention, described
from msgspec import structs

from instep import WeightSync
from instep.engine.remote import http_control
from instep.engine.remote.http_control import PREFIX, Served
from instep.plan.routes import signature
from instep.protocol import PrepareRequest, encode

pytestmark = pytest.mark.usefixtures("segments")


def test_a_request_that_is_sent_again_runs_once_and_gets_the_same_answer() -> None:
    at = served()
    first, second = run(at, ("hello", call(1, request())), ("hello", call(1, request(), again=True)))
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert at.engine.calls == ["hello"]  # type: ignore[attr-defined]


def test_one_that_asks_what_came_of_a_request_runs_nothing() -> None:
    at = served()
    [answer] = run(at, ("resume", call(1, encode(()), again=True)))
    assert (answer.status_code, at.engine.calls) == (409, [])  # type: ignore[attr-defined]
    assert "nothing was done" in answer.json()["error"]


def test_a_whole_push_that_is_replayed_changes_nothing() -> None:
    """Every request of it, as it was sent and with new numbers."""
    at = served()
    sent: list[tuple[str, bytes]] = []
    answer = at.answer

    async def noted(route: str, payload: bytes) -> bytes:
        sent.append((route, payload))
        return await answer(route, payload)

    at.answer = noted  # type: ignore[method-assign]
    with WeightSync(attention(1), [asgi_engine(at)]) as sync:
        sync.push("v1")
        sync.push("v2")
    at.answer = answer  # type: ignore[method-assign]
    assert {"hello", "trace", "prepare", "pause", "commit", "label", "resume", "refuse"} <= {route for route, _ in sent}
    before = state(at)
    commits = [(route, payload) for route, payload in sent if route in ("prepare", "ready", "commit", "abort")]
    for number, (route, payload) in enumerate(commits, 1000):
        [late] = run(at, (route, call(number, payload, name="replayer")))
        assert route in ("abort", "ready") or 400 <= late.status_code < 500
    assert state(at)[:5] == before[:5]
    assert [worker[:4] for worker in state(at)[5]] == [worker[:4] for worker in before[5]]


def test_old_numbers_are_refused() -> None:
    at = served()
    run(at, ("status", call(1, request())), ("status", call(1000, request())))
    for number in (2, 700):
        [answer] = run(at, ("status", call(number, request())))
        assert answer.status_code == 409
    [other] = run(at, ("hello", call(1000, request())))
    assert (other.status_code, "was another request" in other.json()["error"]) == (409, True)


# Whose end matters.


async def lose(at: Served, route: str, body: bytes) -> None:
    """A request whose connection ends while the engine is at work."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(_: Any) -> None: ...

    headers = [(name.encode(), value.encode()) for name, value in ALLOWED.items()]
    await app(at)({"type": "http", "method": "POST", "path": f"{PREFIX}/{route}", "headers": headers}, receive, send)


@pytest.mark.parametrize("name", ["trainer", "monitor"])
def test_a_connection_that_ends_is_the_end_of_a_push_only_where_it_is_the_trainers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_control, "GRACE", 0.01)
    at, weights = served(), attention(1)
    engine: Any = at.engine
    with WeightSync(weights, [asgi_engine(at)]) as sync:
        sync.push("v1")
        assert sync._session.current is not None
        manifest = structs.replace(sync._session.current.manifest, version="v2")
        prepare = request(PrepareRequest(manifest, signature(described(weights)), 60.0, 60.0))
        run(at, ("prepare", call(1, prepare, name="trainer")), ("pause", call(2, encode(("reset",)), name="trainer")))
        answer = at.answer

        async def slowly(route: str, payload: bytes) -> bytes:
            await asyncio.sleep(0.05)
            return await answer(route, payload)

        at.answer = slowly  # type: ignore[method-assign]
        asyncio.run(lose(at, "hello", call(3, request(), name=name)))
        deadline = time.monotonic() + (10 if name == "trainer" else 0.3)
        while engine.paused and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.paused == (name == "monitor")
        run(at, ("abort", call(9, request(), name="trainer")))
