"""Scripted engines, a tokenizer and tools for tests of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from instep.generation import (
    Completion,
    Harness,
    Limits,
    PromptId,
    PromptRequest,
    RequestId,
    Sampling,
    ToolDefinition,
    ToolOutput,
    ToolSet,
    VersionSpan,
)
from instep.generation.tools.parsers import TaggedParser, ToolParser

T = TypeVar("T")

PIECES = {"<|end|>": 1, "<|user|>": 2, "<|model|>": 3, "hello": 1001, "he": 1002, "llo": 1003, "</say>\n": 1004}
SPECIAL = (1, 2, 3)
TEXTS = {token_id: text for text, token_id in PIECES.items()}


class Tokenizer:
    """A token for each character, and some longer ones: `hello` is encoded as one token and may be sampled as two."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids, position = [], 0
        while position < len(text):
            piece = next((piece for piece in PIECES if text.startswith(piece, position)), text[position])
            token_ids.append(PIECES[piece] if piece in PIECES else ord(piece))
            position += len(piece)
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(TEXTS.get(token, chr(token)) for token in token_ids if not (skip_special_tokens and token in SPECIAL))

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any) -> str:
        marks = {"user": "<|user|>", "assistant": "<|model|>", "tool": "<|user|>tool:"}
        text = "".join(f"{marks[message['role']]}{message['content']}<|end|>\n" for message in messages)
        return text + "<|model|>" * add_generation_prompt


TOKENIZER = Tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def decode(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def said(text: str | list[int], finish: Any = "stop", versions: Sequence[tuple[str, int, int]] | None = None) -> Completion:
    """What an engine answers that said this."""
    token_ids = encode(text) if isinstance(text, str) else text
    spans = versions if versions is not None else [("v1", 0, len(token_ids))]
    logprobs = [-(index + 1) / 8 for index in range(len(token_ids))]
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason=finish, versions=[VersionSpan(*span) for span in spans])


Turn = Completion | Exception | Callable[[list[int], Sampling], Completion]


class ScriptedClient:
    """Answers each sample's turns with the script, and keeps what it was asked. A turn of `HANG` is answered when it is aborted."""

    def __init__(self, *turns: Turn, aborted: Completion | None = None) -> None:
        self.turns = turns
        self.aborted = aborted or said("", "abort")
        self.asked: list[tuple[RequestId, int, list[int], Sampling]] = []
        self.aborts: list[RequestId] = []
        self.cancelled: list[RequestId] = []
        self.hanging: dict[RequestId, asyncio.Event] = {}

    async def complete(self, prompt_token_ids: Sequence[int], sampling: Sampling, id: RequestId, turn: int) -> Completion:
        self.asked.append((id, turn, list(prompt_token_ids), sampling))
        answer = self.turns[turn]
        await asyncio.sleep(0)
        if answer is HANG:
            self.hanging[id] = asyncio.Event()
            try:
                await self.hanging[id].wait()
            except asyncio.CancelledError:
                self.cancelled.append(id)
                raise
            return self.aborted
        if isinstance(answer, Exception):
            raise answer
        return answer(list(prompt_token_ids), sampling) if callable(answer) else answer

    async def abort(self, id: RequestId) -> None:
        self.aborts.append(id)
        self.hanging[id].set()


def HANG(prompt_token_ids: list[int], sampling: Sampling) -> Completion:
    raise AssertionError("answered by the client itself")


class Say:
    """A tool that answers with what `answer` makes of its argument."""

    def __init__(self, answer: Callable[[str], Any] = lambda text: f"said {text}", name: str = "say", **properties: Any) -> None:
        self.answer = answer
        self.name = name
        self.properties = properties or {"text": {"type": "string"}}
        self.calls: list[dict[str, Any]] = []

    def describe(self) -> ToolDefinition:
        schema = {"type": "object", "properties": self.properties, "required": list(self.properties)[:1]}
        return ToolDefinition(self.name, f"Says {self.name}.", schema)

    async def execute(self, **arguments: Any) -> ToolOutput | str:
        self.calls.append(arguments)
        answer = self.answer(next(iter(arguments.values())))
        return await answer if asyncio.iscoroutine(answer) else answer


class Room:
    """An environment that counts its sample's steps, gives each a reward, and is done after `steps`."""

    def __init__(self, steps: int = 2, name: str = "room") -> None:
        self.steps = steps
        self.name = name
        self.events: list[str] = []

    def describe(self) -> ToolDefinition:
        return ToolDefinition(self.name, "Walks.", {"type": "object", "properties": {"move": {"type": "string"}}})

    @asynccontextmanager
    async def session(self, id: RequestId, config: dict[str, Any]) -> AsyncIterator[Say]:
        self.events.append(f"open {id.sample} {config}")
        taken = 0

        def step(move: str) -> ToolOutput:
            nonlocal taken
            taken += 1
            return ToolOutput(text=f"step {taken}", reward=taken / 2, done=taken == self.steps, role="user")

        try:
            yield Say(step, self.name)
        finally:
            self.events.append(f"close {id.sample}")


def request(prompt: str = "hi", **settings: Any) -> PromptRequest:
    """A prompt; settings of `Sampling` go there."""
    sampling = {name: settings.pop(name) for name in list(settings) if name in Sampling.__struct_fields__}
    return PromptRequest(
        id=settings.pop("id", PromptId("train", 0, "p")),
        prompt_token_ids=encode(prompt),
        sampling=Sampling(**{"max_tokens": 1000, **sampling}),
        **settings,
    )


def harness(*tools: Any, parser: ToolParser | None = None, **limits: Any) -> Harness:
    """With these tools and the tagged parser. `run` must not be running."""
    parser = parser or (TaggedParser(TOKENIZER) if tools else None)
    return Harness(TOKENIZER, Limits(**{"max_model_len": 4000, **limits}), run(ToolSet.connect(tools)), parser)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, within ten seconds."""
    return asyncio.run(asyncio.wait_for(coroutine, 10.0))


async def until(condition: Callable[[], Any]) -> None:
    """Waits for something that nobody reports."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
