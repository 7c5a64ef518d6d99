"""Parsers: they read tool calls from a model's text, and write the results for the model.

A parser reads one turn's text, decoded from the very tokens that the engine sampled. What looks
like a call and cannot be read is a `ToolCall` with an error, so that the model is told; a parser
never raises because of what a model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from instep.errors import ConfigError
from instep.generation.text import Encoder, Tokenizer, clean, plain
from instep.generation.tools.toolset import ToolDefinition
from instep.generation.types import ToolCall, ToolRecord

Extract = Callable[[str, list[dict[str, Any]]], list[tuple[str, str]] | None]
"""Takes a turn's text and OpenAI's definitions of the tools. Gives each call's name and arguments
(JSON), or None for broken calls."""


class ToolParser(Protocol):
    """The tool-call format of one family of models."""

    def stops(self, tools: Sequence[ToolDefinition]) -> tuple[str, ...]:
        """Returns the strings that end a turn because a call ends with them. Asked for each
        sample: one without tools has no such strings."""

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> list[ToolCall]:
        """Returns the calls in a turn's text, in order."""

    def observe(self, records: Sequence[ToolRecord], last_token_id: int) -> list[int]:
        """Returns tokens that show the model the results of its calls and begin its next turn.
        They follow `last_token_id`, the turn's last."""


def main_argument(tool: ToolDefinition) -> str:
    """Returns the name of the argument that takes a call's whole text: the first required one,
    else the first, else `text`."""
    candidates = [*tool.parameters.get("required", ()), *tool.parameters.get("properties", {}), "text"]
    return str(candidates[0])


class TaggedParser:
    """Reads `<name>…</name>` as a call of the tool `name` with the text between. The result is
    shown between `<output>` and `</output>`."""

    def __init__(self, tokenizer: Tokenizer, output_tag: str = "output") -> None:
        self.encoder = Encoder(tokenizer)
        self.output_tag = output_tag

    def stops(self, tools: Sequence[ToolDefinition]) -> tuple[str, ...]:
        return tuple(f"</{tool.name}>" for tool in tools)

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> list[ToolCall]:
        calls = []
        position, waiting = 0, {tool.name: tool for tool in tools}
        starts = dict.fromkeys(waiting, -1)
        while waiting:
            for name in list(waiting):
                if starts[name] < position:  # else nobody has passed the one that was found
                    starts[name] = text.find(f"<{name}>", position)
                    if starts[name] < 0:
                        waiting.pop(name)
            if not waiting:
                break
            name = min(waiting, key=starts.__getitem__)
            start = starts[name] + len(name) + 2
            end = text.find(f"</{name}>", start)
            if end < 0:
                waiting.pop(name)  # never closed from here on: text, and nobody looks for it again
                continue
            calls.append(ToolCall(name, {main_argument(waiting[name]): text[start:end].strip("\n")}))
            position = end + len(name) + 3
        return calls

    def observe(self, records: Sequence[ToolRecord], last_token_id: int) -> list[int]:  # noqa: ARG002
        tag = self.output_tag
        blocks = [f"<{tag}>\n{self.encoder.strange(record.observation)}\n</{tag}>\n" for record in records]
        return self.encoder.encode("\n" + "".join(blocks))


class WholeTurnParser:
    """Hands a turn's whole text to one tool: always, or only if one of `markers` occurs in the
    text.

    For environments that listen to everything, and for tools that have their own syntax. Calls that
    `inner` finds come first; it also says how observations are shown.
    """

    def __init__(self, tool: str, inner: ToolParser, markers: Sequence[str] = ()) -> None:
        self.tool = tool
        self.inner = inner
        self.markers = tuple(dict.fromkeys(markers))

    def stops(self, tools: Sequence[ToolDefinition]) -> tuple[str, ...]:
        listens = any(tool.name == self.tool for tool in tools)
        return (*self.inner.stops(self._others(tools)), *(self.markers if listens else ()))

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> list[ToolCall]:
        calls = self.inner.parse(text, self._others(tools))
        listener = next((tool for tool in tools if tool.name == self.tool), None)
        if listener and (not self.markers or any(marker in text for marker in self.markers)):
            calls.append(ToolCall(self.tool, {main_argument(listener): text}))
        return calls

    def observe(self, records: Sequence[ToolRecord], last_token_id: int) -> list[int]:
        return self.inner.observe(records, last_token_id)

    def _others(self, tools: Sequence[ToolDefinition]) -> list[ToolDefinition]:
        return [tool for tool in tools if tool.name != self.tool]


class ChatParser:
    """Reads calls in a model's own format with `extract`, and shows results in the form of the
    tokenizer's chat template.

    reasoning_end: the marker after a model's reasoning. Calls are read behind the last one: what a
    model thinks of calling is no call.
    template_kwargs: further arguments of the chat template.
    Raises `ConfigError` where the chat template cannot show a tool's message.
    """

    def __init__(
        self,
        tokenizer: Any,
        extract: Extract,
        *,
        reasoning_end: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.extract = extract
        self.reasoning_end = reasoning_end
        self.template_kwargs = template_kwargs or {}
        try:
            shown = self._continuation([{"role": "tool", "name": "probe", "content": "probe"}])
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"the tokenizer's chat template does not take a tool's message: {error}") from error
        if "probe" not in shown:
            raise ConfigError("the tokenizer's chat template leaves out what a tool answers")

    def stops(self, tools: Sequence[ToolDefinition]) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> list[ToolCall]:
        if self.reasoning_end:
            text = text.rpartition(self.reasoning_end)[2]
        found = self.extract(text, [tool.openai() for tool in tools])
        if found is None:
            return [ToolCall("", error="the tool call could not be read: write it in the format that you were given, with valid JSON")]
        return [_read(name, arguments) for name, arguments in found]

    def observe(self, records: Sequence[ToolRecord], last_token_id: int) -> list[int]:
        strange = self.encoder.strange
        messages = [{"role": record.role, "name": strange(record.tool), "content": strange(record.observation)} for record in records]
        token_ids = self.encoder.encode(self._continuation(messages))
        # The template closes the model's turn. Where the model has done so itself, its end token is
        # there already.
        return token_ids[1:] if token_ids[:1] == [last_token_id] else token_ids

    def _continuation(self, messages: list[dict[str, Any]]) -> str:
        """Returns what the template writes after the content of the model's turn, if `messages`
        and a new turn of the model follow."""
        said = "\u2063instep\u2063"  # nothing that a template writes itself
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}, *messages]
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **self.template_kwargs)
        return str(text.partition(said)[2])


def vllm_parser(name: str, tokenizer: Any, **settings: Any) -> ChatParser:
    """Returns vLLM's own parser of that name, such as `hermes`, `llama3_json` or `qwen3_xml`;
    `settings` are those of `ChatParser`.

    Raises `ConfigError` for a name that this vLLM does not have, and where there is no vLLM.
    """
    from instep.engine.vllm.parsers import load

    return ChatParser(tokenizer, load(name, tokenizer), **settings)


def readable(call: ToolCall) -> ToolCall:
    """Returns the call with clean text. If its arguments cannot be taken, returns one with an
    error."""
    try:
        return ToolCall(clean(call.name), plain(call.arguments), call.error and clean(call.error))
    except (ValueError, RecursionError) as error:
        return ToolCall(clean(call.name), error=f"the arguments cannot be read: {error}")


def _read(name: str, arguments: str) -> ToolCall:
    try:
        read = json.loads(arguments)
        read = json.loads(read) if isinstance(read, str) else read  # an object written as a string
    except ValueError as error:
        return ToolCall(name, error=f"the arguments are not valid JSON: {error}")
    except RecursionError:
        return ToolCall(name, error="the arguments are nested too deep")
    if not isinstance(read, dict):
        return ToolCall(name, error=f"the arguments must be a JSON object, not {type(read).__name__}")
    return ToolCall(name, read)
