"""Which versions made an answer: headers, the last events of streams, and streams that begin before their first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from helpers.asgi import TOKEN
from helpers.toys import attention

from instep import MemoryEngine
from instep.engine.remote.answers import Answer, answer
from instep.engine.remote.asgi import App, Receive, Scope, Send
from instep.engine.remote.http_control import Control, Served
from instep.engine.vllm.answers import note_versions

FIRST, LAST = "x-instep-version-first", "x-instep-version-last"
Told = tuple[httpx.Headers, str]


def asked(app: App, *, tells: bool = True, twice: bool = False) -> Told:
    """What a client gets for a POST: headers and body."""
    served = Served(MemoryEngine(attention(0)), TOKEN)
    served.tells = tells
    control = Control(app, lambda _: served)
    control = Control(control, lambda _: served) if twice else control

    async def main() -> Told:
        transport = httpx.ASGITransport(control)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            response = await client.post("/v1/completions")
            return response.headers, response.text

    return asyncio.run(main())


class Model:
    """Requests of one answer. Tokens are made by whoever runs the engine, not by the task that answers."""

    def __init__(self) -> None:
        self.made = answer.get() or Answer()
        self.left = 0

    def begin(self) -> None:
        self.left += 1
        self.made.running.append(lambda: self.left > 0)

    def token(self, version: str) -> None:
        self.made.note(version)

    def end(self) -> None:
        self.left -= 1


def complete(*versions: str, kind: str = "application/json", body: bytes = b'{"choices":[]}') -> App:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        model = Model()
        model.begin()
        for version in versions:
            model.token(version)
        model.end()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        await send({"type": "http.response.body", "body": body})

    return app


def stream(says: Callable[[Model], AsyncIterator[str]], kind: bytes = b"text/event-stream; charset=utf-8") -> App:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        async for event in says(Model()):
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def events(body: str) -> list[Any]:
    """The JSON events of a stream."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("versions", "first", "last"), [(["a"], "a", "a"), (["a", "a", "b"], "a", "b"), (["a", "b", "c"], "a", "c")])
def test_an_answer_names_the_versions_of_its_first_and_last_token(versions: list[str], first: str, last: str) -> None:
    headers, body = asked(complete(*versions))
    assert (headers[FIRST], headers[LAST], body) == (first, last, '{"choices":[]}')


@pytest.mark.parametrize("tells", [True, False])
def test_an_answer_without_tokens_names_none(tells: bool) -> None:
    headers, body = asked(complete(), tells=tells)
    assert (FIRST in headers, LAST in headers, body) == (False, False, '{"choices":[]}')


@pytest.mark.parametrize("version", ["50%", 'a"b\\c', "~!@#$^&*()"])
def test_versions_are_told_as_they_are(version: str) -> None:
    headers, _ = asked(complete(version))
    assert headers[FIRST] == headers[LAST] == version
    _, body = asked(stream(finished(version)))
    assert events(body)[-1]["instep"] == {"version_first": version, "version_last": version}


@pytest.mark.parametrize("label", ["naïve", "two\r\nx-evil: 1", ""])
def test_labels_that_others_gave_break_no_header(label: str) -> None:
    headers, _ = asked(complete(label))
    assert "x-evil" not in headers
    assert headers[FIRST].isascii()


def finished(*versions: str) -> Callable[[Model], AsyncIterator[str]]:
    """A chunk for each token, one that says that it is finished, one with the usage, and the end."""

    async def says(model: Model) -> AsyncIterator[str]:
        model.begin()
        for version in versions:
            model.token(version)
            yield event(choices=[{"text": "data: {"}])
        model.end()
        yield event(choices=[{"finish_reason": "stop"}])
        yield event(choices=[], usage={"total_tokens": 3})
        yield "data: [DONE]\n\n"

    return says


@pytest.mark.parametrize("twice", [False, True])
def test_a_stream_names_the_first_in_its_headers_and_the_last_in_its_last_events(twice: bool) -> None:
    headers, body = asked(stream(finished("a", "a", "b")), twice=twice)
    assert headers.get_list(FIRST) == ["a"]
    assert LAST not in headers
    parsed = events(body)
    told = [found.pop("instep", None) for found in parsed]
    assert told == [None] * 3 + [{"version_first": "a", "version_last": "b"}] * 2
    assert parsed[0] == {"choices": [{"text": "data: {"}]}
    assert parsed[-1] == {"choices": [], "usage": {"total_tokens": 3}}
    assert body.endswith("data: [DONE]\n\n")


def test_an_engine_that_notes_nothing_is_passed_through() -> None:
    said: list[str] = []

    async def says(_: Model) -> AsyncIterator[str]:
        for text in ("data: {}\n\n", event(a=1), "data: [DONE]\n\n"):
            said.append(text)
            yield text

    headers, body = asked(stream(says), tells=False)
    assert (FIRST in headers, body) == (False, "".join(said))


def sent(says: Callable[[Model], AsyncIterator[str]]) -> list[tuple[str, bytes, dict[bytes, bytes]]]:
    """Each message in the order in which a client gets them, with a note `-` where the answer makes its next step."""
    served = Served(MemoryEngine(attention(0)), TOKEN)
    served.tells = True
    found: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def send(message: Any) -> None:
        found.append((message["type"].rpartition(".")[2], message.get("body", b""), dict(message.get("headers", ()))))

    async def noted(model: Model) -> AsyncIterator[str]:
        async for text in says(model):
            found.append(("-", b"", {}))
            yield text

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "POST", "path": "/v1/responses"}
    asyncio.run(_awaited(Control(stream(noted), lambda _: served)(scope, receive, send)))
    return found


async def _awaited(call: Awaitable[None]) -> None:
    await call


def test_events_before_the_first_token_wait_for_it_and_nothing_else_does() -> None:
    async def says(model: Model) -> AsyncIterator[str]:
        yield event(type="response.created")
        yield event(type="response.in_progress")
        model.begin()
        model.token("a")
        yield event(type="delta")
        yield event(type="delta")

    found = sent(says)
    assert [kind for kind, *_ in found] == ["-", "-", "-", "start", "body", "body", "body", "-", "body", "body"]
    assert found[3][2][FIRST.encode()] == b"a"


def test_a_stream_that_is_kept_alive_by_comments_does_not_wait() -> None:
    """Its first version is in its last events all the same."""

    async def says(model: Model) -> AsyncIterator[str]:
        yield ": keep-alive\n\n"
        for text in [text async for text in finished("a", "b")(model)]:
            yield text

    found = sent(says)
    assert [kind for kind, *_ in found[:3]] == ["-", "start", "body"]
    assert FIRST.encode() not in found[1][2]
    assert b'"version_first":"a","version_last":"b"' in found[-4][1]


@pytest.mark.parametrize("say", [[], [event(error={"code": 400}), "data: [DONE]\n\n"]])
def test_a_stream_without_tokens_ends_as_it_would(say: list[str]) -> None:
    async def says(_: Model) -> AsyncIterator[str]:
        for text in say:
            yield text

    found = sent(says)
    assert b"".join(body for _, body, _ in found) == "".join(say).encode()
    assert not any(name.startswith(b"x-instep") for _, _, headers in found for name in headers)


def test_an_answer_that_breaks_before_its_first_token_is_left_to_the_server() -> None:
    """It has sent nothing yet, so it can still answer 500."""

    async def says(_: Model) -> AsyncIterator[str]:
        yield event(type="response.created")
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="died"):
        sent(says)


# What vLLM's front end does with the tokens that come from its engine process.


class Processor:
    """vLLM's `OutputProcessor`, in so far as it knows requests."""

    class State:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def track_weight_version(self, version: str) -> None:
            self.seen.append(version)

    def __init__(self) -> None:
        self.request_states: dict[str, Processor.State] = {}

    def add_request(self, request: Any, prompt: str | None = None, parent: Any = None, index: int = 0, queue: Any = None) -> None:
        self.request_states.setdefault(request.request_id, self.State())


def test_all_requests_of_an_answer_count_in_the_order_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engine.vllm.answers._labels", lambda: True)
    llm: Any = type("LLM", (), {})()
    llm.output_processor = processor = Processor()
    assert note_versions(llm)

    def request(number: str) -> Any:
        return type("Request", (), {"request_id": number})()

    async def answered() -> Answer:
        made = Answer()
        answer.set(made)
        await asyncio.gather(*(asyncio.create_task(add(number)) for number in ("0", "1")))
        processor.add_request(request("1"), None, queue=None)  # more input for the same request
        return made

    async def add(number: str) -> None:
        processor.add_request(request(number), None, None, 0, None)

    async def main() -> Answer:
        other = asyncio.create_task(add("elsewhere"))
        made = await asyncio.create_task(answered())
        await other
        return made

    made = asyncio.run(main())
    for number, version in (("elsewhere", "z"), ("1", "a"), ("0", "a"), ("0", "b"), ("1", "b")):
        processor.request_states[number].track_weight_version(version)
    assert (made.versions, made.over) == (["a", "b"], False)
    assert processor.request_states["1"].seen == ["a", "b"]
    del processor.request_states["0"]
    assert not made.over
    del processor.request_states["1"]
    assert made.over


def test_a_vllm_that_does_not_label_its_tokens_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engine.vllm.answers._labels", lambda: False)
    llm: Any = type("LLM", (), {})()
    llm.output_processor = Processor()
    assert not note_versions(llm)
    assert "add_request" not in vars(llm.output_processor)
