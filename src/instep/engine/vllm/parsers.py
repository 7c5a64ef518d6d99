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
JSON_CALL = re.compile(r'"name"\s*:[\s\S]*"(arguments|parameters)"\s*:|<tool_call>|<function')

KEPT = 64
"""Parsers are made for a set of tools, which takes up to 0.1 s, and kept for so many sets."""


def load(name: str, tokenizer: Any) -> Callable[[str, list[dict[str, Any]]], list[tuple[str, str]] | None]:
    """A function from a turn's text and OpenAI's definitions of the tools to each call's name and arguments (JSON).

    It gives None where the text holds a call that the parser cannot read: vLLM takes that for an ordinary answer, and loses valid calls
    beside it. Raises `ConfigError` for a parser that this vLLM does not have or that does not suit the tokenizer.
    """
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"vLLM's tool parsers cannot be imported: {error}", next_step="install vLLM 0.26 or later") from error
    try:
        kind = ToolParserManager.get_tool_parser(name)
        kind(tokenizer)
    except KeyError as error:
        raise ConfigError(f"vLLM has no tool parser {name!r}; it has {', '.join(names())}") from error
    except Exception as error:  # parsers look for their tokens in the tokenizer's vocabulary
        raise ConfigError(f"vLLM's tool parser {name!r} does not suit this tokenizer: {error}") from error
    # It logs a traceback for every call that it cannot read. The model is told of it, and the sample's record has it.
    logging.getLogger(kind.__module__).setLevel(logging.CRITICAL)

    @lru_cache(KEPT)
    def prepared(definitions: str) -> tuple[Any, Any]:
        request = ChatCompletionRequest(model="", messages=[], tools=json.loads(definitions))
        return kind(tokenizer, request.tools), request

    def extract(text: str, tools: list[dict[str, Any]]) -> list[tuple[str, str]] | None:
        parser, request = prepared(json.dumps(tools, sort_keys=True))
        try:
            calls = parser.extract_tool_calls(text, request).tool_calls
        except Exception:  # whatever a model wrote, it must not end the run
            return None
        if not calls and _looks_like_a_call(parser, text):
            return None
        return [(call.function.name, call.function.arguments) for call in calls]

    return extract


def names() -> list[str]:
    """The parsers that this vLLM has."""
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"vLLM's tool parsers cannot be imported: {error}", next_step="install vLLM 0.26 or later") from error
    return sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers})


def _looks_like_a_call(parser: Any, text: str) -> bool:
    markers = (getattr(parser, name) for name in dir(parser) if MARKER.fullmatch(name))
    return bool(JSON_CALL.search(text)) or any(isinstance(marker, str) and marker in text for marker in markers)
