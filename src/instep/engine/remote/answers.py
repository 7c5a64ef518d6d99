"""Tells over HTTP which versions of the weights have made an answer.

    x-instep-version-first   of the answer's first token
    x-instep-version-last    of its last token, where the answer is sent when it is complete

A stream's headers are sent with its first token. Its last version is in its last JSON events:

    data: {"instep":{"version_first":"step-6","version_last":"step-7"},"id":"chatcmpl-...", ...}

This file knows HTTP alone. The engine notes the versions, in the task that answers a request or in
one that this task starts (see `vllm/answers.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import quote

from instep.engine.remote.asgi import App, Message, Receive, Scope, Send

FIRST, LAST = b"x-instep-version-first", b"x-instep-version-last"
EVENT = re.compile(rb'(?:^|(?<=\n))data: \{(?=")')
"""The beginning of a server-sent event's JSON object that is not empty. Strings in JSON have no
line breaks."""


class Answer:
    """The versions of one answer while it is made."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        """Those that have made tokens of it, in the order in which they did."""
        self.running: list[Callable[[], bool]] = []
        """Whether each request that it makes to the engine still runs."""

    def note(self, version: str) -> None:
        """Notes that `version` has made more of the answer's tokens."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)

    @property
    def over(self) -> bool:
        """Whether the answer has tokens, and gets no more unless it asks the engine again."""
        return bool(self.versions) and not any(running() for running in self.running)


answer: ContextVar[Answer | None] = ContextVar("instep_answer", default=None)
"""The one that the current task makes, if it answers a request over HTTP."""


async def told(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs `app`, and adds the versions to the messages that it sends. If an outer call adds
    them already, this one only runs `app`."""
    if answer.get() is not None:
        return await app(scope, receive, send)
    here = Answer()
    token = answer.set(here)
    try:
        await app(scope, receive, _Telling(here, send))
    finally:
        answer.reset(token)


class _Telling:
    """An ASGI `send` that adds the versions."""

    def __init__(self, made: Answer, send: Send) -> None:
        self.answer, self.send = made, send
        self.held: list[Message] = []
        """The beginning of a stream, until its first token is there."""
        self.stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.stream = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")
            if self.stream:
                self.held = [message]
                return
            message = _with_headers(message, self.answer.versions, last=True)
        elif self.stream and message["type"] == "http.response.body":
            message = self._with_versions(message)
        if self.held and not self._begins(message):
            self.held.append(message)
            return
        await self._release()
        await self.send(message)

    def _begins(self, message: Message) -> bool:
        """Whether a stream must be held no longer: it has a token, it ends, or a comment is to
        keep it alive."""
        ends = message["type"] != "http.response.body" or not message.get("more_body", False)
        return bool(self.answer.versions) or ends or message.get("body", b"").startswith(b":")

    async def _release(self) -> None:
        held, self.held = self.held, []
        for index, message in enumerate(held):
            await self.send(_with_headers(message, self.answer.versions, last=False) if index == 0 else message)

    def _with_versions(self, message: Message) -> Message:
        if not self.answer.over:
            return message
        first, last = json.dumps(self.answer.versions[0]), json.dumps(self.answer.versions[-1])
        told = f'data: {{"instep":{{"version_first":{first},"version_last":{last}}},'.encode()
        return {**message, "body": EVENT.sub(lambda _: told, message.get("body", b""))}


def _with_headers(message: Message, versions: list[str], *, last: bool) -> Message:
    if not versions:
        return message
    told = [(FIRST, _value(versions[0])), *([(LAST, _value(versions[-1]))] if last else [])]
    return {**message, "headers": [*message.get("headers", ()), *told]}


def _value(version: str) -> bytes:
    """A version as it is, if it can stand in a header, as those of instep can."""
    return (version if version.isascii() and version.isprintable() else quote(version)).encode()
