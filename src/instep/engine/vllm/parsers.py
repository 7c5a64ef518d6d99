"""vLLM's own parsers of tool calls, by the names that `vllm serve --tool-call-parser` takes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from instep.errors import ConfigError

MARKER = re.compile(r"(tool_calls?_(start|begin)|bot)_token")
"""How vLLM's parsers name the text that a call starts with."""
NAME, ARGUMENTS = re.compile(r'"name"\s*+:'), re.compile(r'"(?:arguments|parameters)"\s*+:')

KEPT = 64
"""Parsers are made for a set of tools, which takes up to 0.1 s, and kept for so many sets."""


def load(name: str, tokenizer: Any) -> Callable[[str, list[dict[str, Any]]], list[tuple[str, str]] | None]:
    """Returns a function that reads tool calls. It takes a turn's text and OpenAI's definitions
    of the tools, and returns each call's name and arguments (JSON).

    It gives None where the text holds a call that the parser cannot read: vLLM takes that for an
    ordinary answer, and loses valid calls beside it. Raises `ConfigError` for a parser that this
    vLLM does not have or that does not suit the tokenizer.
    """
    manager, ChatCompletionRequest = _vllm()
    try:
        kind = manager.get_tool_parser(name)
        kind(tokenizer)
    except KeyError as error:
        raise ConfigError(f"vLLM has no tool parser {name!r}; it has {', '.join(names())}") from error
    except Exception as error:  # parsers look for their tokens in the tokenizer's vocabulary
        raise ConfigError(f"vLLM's tool parser {name!r} does not suit this tokenizer: {error}") from error
    # It logs a traceback for every call that it cannot read. The model is told of it, and the
    # sample's record has it.
    logging.getLogger(kind.__module__).setLevel(logging.CRITICAL)

    @lru_cache(KEPT)
    def idle(definitions: str) -> list[Any]:  # noqa: ARG001
        """Returns the parsers of these tools that are not in use. One parser reads one text at a
        time, and several threads may read texts."""
        return []

    def extract(text: str, tools: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
        definitions = json.dumps(tools, sort_keys=True)
        kept = idle(definitions)
        try:
            parser, request = kept.pop()
        except IndexError:
            request = ChatCompletionRequest(model="", messages=[], tools=json.loads(definitions))
            parser = kind(tokenizer, request.tools)
        try:
            calls = parser.extract_tool_calls(text, request).tool_calls
        except Exception:  # whatever a model wrote, it must not end the run
            return None
        kept.append((parser, request))
        if not calls and _looks_like_a_call(parser, text):
            return None
        return [(call.function.name, call.function.arguments) for call in calls]

    return extract


def names() -> list[str]:
    """Returns the names of the parsers that this vLLM has."""
    manager, _ = _vllm()
    return sorted({*manager.lazy_parsers, *manager.tool_parsers})


def _vllm() -> tuple[Any, Any]:
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"vLLM's tool parsers cannot be imported: {error}", next_step="install vLLM 0.26 or later") from error
    return ToolParserManager, ChatCompletionRequest


def _looks_like_a_call(parser: Any, text: str) -> bool:
    markers = (getattr(parser, name) for name in dir(parser) if MARKER.fullmatch(name))
    if any(mark in text for mark in ("<tool_call>", "<function")) or any(isinstance(marker, str) and marker in text for marker in markers):
        return True
    name = NAME.search(text)
    return name is not None and ARGUMENTS.search(text, name.end()) is not None
