"""Open Instruct's tools and parsers: Ray actors with `safe_execute`, and parsers by the names of
their formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from instep.errors import ConfigError
from instep.extras import needed_by
from instep.generation.text import Tokenizer
from instep.generation.tools.parsers import TaggedParser, ToolParser, WholeTurnParser, vllm_parser
from instep.generation.tools.toolset import ToolDefinition, ToolOutput

with needed_by("tools that are Ray actors"):
    import ray

WITHIN = 60.0
"""Seconds in which tools must say what they are."""
OF_VLLM = "vllm_"


@dataclass(frozen=True)
class ToolActor:
    """A tool that calls a Ray actor's `safe_execute`. stops: strings that end a model's turn
    because a call ends with them."""

    handle: Any
    definition: ToolDefinition
    stops: tuple[str, ...] = ()

    def describe(self) -> ToolDefinition:
        return self.definition

    async def execute(self, **arguments: Any) -> ToolOutput:
        reference = self.handle.safe_execute.remote(**arguments)
        try:
            answer = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)  # or a hanging call keeps its place in the actor
            raise
        text, error, late = str(answer.output or ""), answer.error or None, bool(getattr(answer, "timeout", False))
        if error is None and late:
            error = f"{self.definition.name} did not answer in time"
        info = {"called": bool(getattr(answer, "called", True)), "timeout": late, "error": error}
        # The model is shown what the tool says; where that is nothing, what went wrong.
        return ToolOutput(text=text, error=None if text else error, info=info)


def connect(tool_actors: Sequence[Any] | None) -> list[Any]:
    """Makes tools of Ray actors' handles. Handles with `describe` and `execute` stay as they are.

    Raises `ConfigError` for one that is no tool, or that does not say within a minute what it is.
    """
    return [actor if hasattr(actor, "describe") else _connected(actor) for actor in tool_actors or ()]


def parser(kind: str, tools: Sequence[Any]) -> Callable[[Tokenizer], ToolParser] | None:
    """Returns a function that makes the parser of that name for a tokenizer; None if there are
    no tools.

    Raises `ConfigError` for a name that nobody has, and for tools that do not go with it.
    """
    if kind == "legacy":
        made: Callable[[Tokenizer], ToolParser] = TaggedParser
    elif kind == "dr_tulu":
        made = _whole_turn(tools)
    elif kind.startswith(OF_VLLM):
        made = partial(vllm_parser, _known(kind.removeprefix(OF_VLLM)))
    else:
        raise ConfigError(f"tool_parser_type {kind!r} is none of legacy, dr_tulu and {OF_VLLM}NAME, a tool parser of vLLM's")
    return made if tools else None


def _connected(actor: Any) -> ToolActor:
    if missing := [name for name in ("safe_execute", "get_call_name", "get_openai_tool_definitions") if not hasattr(actor, name)]:
        raise ConfigError(f"tool_actors: {actor!r} is no tool, it has no {', '.join(missing)}")
    questions = [actor.get_call_name.remote(), actor.get_openai_tool_definitions.remote()]
    if hasattr(actor, "get_stop_strings"):
        questions.append(actor.get_stop_strings.remote())
    try:
        name, definitions, *stops = ray.get(questions, timeout=WITHIN)
    except ray.exceptions.RayError as error:
        raise ConfigError(f"tool_actors: {actor!r} did not say what it is: {getattr(error, 'cause', None) or error}") from error
    functions = [definition.get("function", definition) for definition in definitions]
    function = next((one for one in functions if one.get("name") == name), functions[0] if functions else {})
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolActor(actor, ToolDefinition(name, function.get("description", ""), parameters), tuple(*stops))


def _whole_turn(tools: Sequence[Any]) -> Callable[[Tokenizer], ToolParser]:
    if not tools:
        return TaggedParser
    if len(tools) > 1:
        raise ConfigError(f"tool_parser_type 'dr_tulu' goes with one tool, and there are {len(tools)}")
    if not (stops := getattr(tools[0], "stops", ())):
        raise ConfigError(
            "tool_parser_type 'dr_tulu' needs a tool that names its stop strings: it has no get_stop_strings, or an empty one"
        )
    return lambda tokenizer: WholeTurnParser(tools[0].definition.name, TaggedParser(tokenizer, "tool_output"), stops)


def _known(name: str) -> str:
    from instep.engine.vllm.parsers import names

    if name not in (known := names()):
        raise ConfigError(f"tool_parser_type: vLLM has no tool parser {name!r}; it has {', '.join(known)}")
    return name
