"""What OpenAI's own package asks a server, and what it is told of the weights that made the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from http_server import Server

FIRST, LAST = "x-instep-version-first", "x-instep-version-last"
PROMPT = "t1 t2 t3 t4 t5"
ALL = {"ignore_eos": True}


@dataclass(frozen=True)
class Told:
    """The versions of the first and the last token, as a client gets to know them."""

    first: str
    last: str


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def in_headers(raw: Any) -> Told:
    """Of an answer as a whole. raw: what `with_raw_response` returns."""
    assert raw.parse() is not None
    return Told(raw.headers[FIRST], raw.headers[LAST])


def in_a_stream(stream: Any) -> Told:
    """Of a stream: the first in its headers, both in its last event."""
    assert LAST not in stream.response.headers
    *_, last = stream
    assert last.instep["version_first"] == stream.response.headers[FIRST]
    return Told(**{name.removeprefix("version_"): version for name, version in last.instep.items()})


def completion(client: openai.OpenAI, model: str, tokens: int) -> Told:
    arguments: Any = {"prompt": PROMPT, "max_tokens": tokens, "extra_body": ALL}
    return in_headers(client.completions.with_raw_response.create(model=model, **arguments))


def completion_stream(client: openai.OpenAI, model: str, tokens: int) -> Told:
    arguments: Any = {"prompt": PROMPT, "max_tokens": tokens, "extra_body": ALL}
    return in_a_stream(client.completions.create(model=model, stream=True, **arguments))


def chat(client: openai.OpenAI, model: str, tokens: int) -> Told:
    arguments: Any = {"messages": said(), "max_tokens": tokens, "n": 2, "extra_body": ALL}
    return in_headers(client.chat.completions.with_raw_response.create(model=model, **arguments))


def chat_stream(client: openai.OpenAI, model: str, tokens: int) -> Told:
    usage = {"include_usage": True}
    arguments: Any = {"messages": said(), "max_tokens": tokens, "extra_body": ALL, "stream_options": usage}
    return in_a_stream(client.chat.completions.create(model=model, stream=True, **arguments))


def response(client: openai.OpenAI, model: str, tokens: int) -> Told:
    arguments: Any = {"input": PROMPT, "max_output_tokens": tokens, "extra_body": ALL}
    return in_headers(client.responses.with_raw_response.create(model=model, **arguments))


def response_stream(client: openai.OpenAI, model: str, tokens: int) -> Told:
    arguments: Any = {"input": PROMPT, "max_output_tokens": tokens, "extra_body": ALL}
    return in_a_stream(client.responses.create(model=model, stream=True, **arguments))


def said() -> Any:
    return [{"role": "user", "content": PROMPT}]


Ask = Callable[[openai.OpenAI, str, int], Told]
ASKS: dict[str, Ask] = {ask.__name__: ask for ask in (completion, completion_stream, chat, chat_stream, response, response_stream)}

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
    "/v1/chat/completions": {"messages": said(), "max_tokens": 3},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 3},
    "/v1/messages": {"messages": said(), "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}},
    "/invocations": {"messages": said(), "max_tokens": 3},
}
"""vLLM's routes that generate and stream, with what to ask them."""
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/batch": {"messages": [said(), said()], "max_tokens": 3},
    "/generative_scoring": {"query": "t1 t2", "items": ["t3", "t4"], "label_token_ids": [5, 6]},
}
"""Those that do not stream."""


def posted(server: Server, route: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(server.url + route, json={"model": str(server.model), **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer
