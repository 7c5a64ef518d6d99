"""Tools: their contract, their arguments, and everything that can go wrong while they run."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from helpers.rollouts import Say, ScriptedClient, decode, harness, request, run, said

from instep.errors import ConfigError
from instep.generation import Sample, ToolDefinition, ToolOutput, ToolSet
from instep.generation.rollout.turns import rollout
from instep.generation.tools.schema import Arguments
from instep.generation.types import ToolCall, ToolRecord


def call(tool: Any, within: float = 5.0, **arguments: Any) -> ToolRecord:
    async def main() -> ToolRecord:
        tools = await ToolSet.connect([tool])
        return await tools.call(ToolCall(tools.definitions[0].name, arguments), within=within)

    return run(main())


def after(tool: Say, **limits: Any) -> Sample:
    """A sample whose model called the tool once."""
    return run(rollout(request(max_tokens=3000), 0, ScriptedClient(said("<say>x</say>"), said("end")), harness(tool, **limits)))


def test_a_tool_that_raises_tells_the_model_what_and_the_sample_goes_on() -> None:
    def fails(text: str) -> str:
        raise ZeroDivisionError("division by zero")

    sample = after(Say(fails))
    assert (sample.tools[0].outcome, sample.finish_reason) == ("error", "stop")
    assert "Error: ZeroDivisionError: division by zero" in decode(sample.token_ids)


def test_a_tool_that_hangs_is_stopped_and_the_model_is_told() -> None:
    sample = after(Say(lambda text: asyncio.sleep(3600, "")), tool_timeout=0.02)
    assert (sample.tools[0].outcome, sample.finish_reason) == ("timeout", "stop")
    assert "Error: say did not answer in 0.02 seconds" in decode(sample.token_ids)


def test_a_tool_that_ignores_being_cancelled_does_not_hold_the_sample() -> None:
    released = asyncio.Event()

    async def stubborn() -> str:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    async def main() -> ToolRecord:
        tools = await ToolSet.connect([Say(lambda text: stubborn())])
        record = await tools.call(ToolCall("say", {"text": ""}), within=0.02)
        released.set()  # only now can it end
        return record

    assert run(main()).outcome == "timeout"


def test_a_time_out_inside_a_tool_is_the_tools_error_not_its_deadline() -> None:
    async def times_out() -> str:
        raise TimeoutError("the database did not answer")

    record = call(Say(lambda text: times_out()), text="x")
    assert (record.outcome, "the database did not answer" in str(record.error)) == ("error", True)


def test_a_tool_that_cancels_itself_is_an_error_and_cancels_nobody_else() -> None:
    async def cancels() -> str:
        raise asyncio.CancelledError

    assert call(Say(lambda text: cancels()), text="x").outcome == "error"


def test_an_error_without_output_is_shown() -> None:
    assert "Error: nothing found" in decode(after(Say(lambda text: ToolOutput(error="nothing found"))).token_ids)


def test_a_megabyte_of_output_is_shortened_before_anything_reads_it() -> None:
    sample = after(Say(lambda text: "y" * 1_000_000), max_tool_output_chars=1000)
    text = decode(sample.token_ids)
    assert f"{'y' * 1000}\n... (999000 more characters left out)\n</output>\nend" in text
    assert (len(sample.tools[0].output) < 1100, sample.cut, sample.finish_reason) == (True, 0, "stop")


def test_output_is_shortened_to_its_own_number_of_tokens_and_the_frame_around_it_stays() -> None:
    sample = after(Say(lambda text: "hello" * 50), max_tool_output_tokens=10)
    assert f"<output>\n{'hello' * 10}\n... (40 more tokens left out)\n</output>\nend" in decode(sample.token_ids)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "3", 3), ("number", "2.5", 2.5), ("number", "3", 3), ("boolean", "True", True), ("boolean", "false", False),
        ("array", "[1, 2]", [1, 2]), ("object", '{"a": 1}', {"a": 1}), ("string", "3", "3"), (["integer", "null"], "null", None),
        (["string", "integer"], "3", "3"),
    ],
)  # fmt: skip
def test_text_that_can_only_mean_one_value_is_converted(kind: Any, text: str, value: Any) -> None:
    read = Arguments({"type": "object", "properties": {"a": {"type": kind}}}).read({"a": text})["a"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'a' is a required property"),
        ({"a": "many"}, "a: 'many' is not of type 'integer'"),
        ({"a": "1.5"}, "a: '1.5' is not of type 'integer'"),
        ({"a": "true"}, "a: 'true' is not of type 'integer'"),
        ({"a": 7}, "7 is greater than the maximum of 5"),
        ({"a": 1, "b": 2}, "unknown argument b; the arguments are a"),
    ],
)
def test_arguments_that_do_not_fit_are_told_and_the_tool_is_not_run(arguments: dict[str, Any], words: str) -> None:
    tool = Say(a={"type": "integer", "maximum": 5})
    record = call(tool, **arguments)
    assert (record.outcome, tool.calls) == ("malformed", [])
    assert words in str(record.error)


BACKTRACKS = "^(a|aa)+$"


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"type": "string", "pattern": BACKTRACKS}}}, {"a": "a" * 100 + "b"}),
        ({"patternProperties": {BACKTRACKS: {}}, "additionalProperties": True}, {"a" * 100 + "b": 1}),
        ({"patternProperties": {BACKTRACKS: {}}, "additionalProperties": {"type": "integer"}}, {"a" * 100 + "b": 1}),
        ({"properties": {}, "additionalProperties": {"propertyNames": {"pattern": BACKTRACKS}}}, {"x": {"a" * 100 + "b": 1}}),
    ],
)
@pytest.mark.timeout(60)  # `re` takes for ever
def test_a_pattern_of_a_schema_that_backtracks_is_a_malformed_call(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    class Picky(Say):
        def describe(self) -> ToolDefinition:
            return ToolDefinition("say", "Says.", {"type": "object", **schema})

    tool = Picky()
    record = call(tool, within=30.0, **arguments)
    assert (record.outcome, tool.calls) == ("malformed", [])
    assert "takes longer than 1 seconds" in str(record.error)


def test_arguments_that_take_for_ever_are_a_malformed_call() -> None:
    tool = Say(a={"type": "array", "uniqueItems": True})
    record = call(tool, within=0.2, a=[{"a": number} for number in range(20_000)])
    assert (record.outcome, record.error) == ("malformed", "the arguments could not be read in 0.2 seconds")


@pytest.mark.parametrize(
    ("schema", "arguments", "words"),
    [
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}, {"xa": 1}, None),
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}, {"xa": "b"}, "xa: 'b' is not of type"),
        ({"properties": {"a": {"additionalProperties": False}}}, {"a": {"b": 1}}, "a: unknown argument b; the arguments are none"),
        ({"additionalProperties": {"type": "integer"}}, {"b": "c"}, "b: 'c' is not of type 'integer'"),
        ({"properties": {"a": {"pattern": "^b+$"}}}, {"a": "bbb"}, None),
        ({"properties": {"a": {"pattern": "^b+$"}}}, {"a": "c"}, "a: 'c' does not match '^b+$'"),
    ],
)
def test_patterns_and_further_properties_mean_what_json_schema_says(schema: Any, arguments: dict[str, Any], words: str | None) -> None:
    made = Arguments({"type": "object", **schema})
    if words is None:
        assert made.read(arguments) == arguments
        return
    with pytest.raises(ValueError, match=re.escape(words)):
        made.read(arguments)


class Sync(Say):
    def execute(self, **arguments: Any) -> str:  # type: ignore[override]
        return ""


class Nameless(Say):
    def describe(self) -> Any:
        return {"name": "x"}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([Sync()], "must be an async method"),
        ([Nameless()], "must return a ToolDefinition"),
        ([Say(), Say()], "two tools are called 'say'"),
        ([Say(a={"type": "nonsense"})], "not a JSON schema"),
        ([object()], "is no tool"),
        ([Say(a={"pattern": "("})], "not a JSON schema"),
        ([Say(a={"patternProperties": {"a": {}}, "unevaluatedProperties": False})], "use additionalProperties"),
    ],
)
def test_what_is_no_tool_is_refused_when_it_is_connected(tools: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(ToolSet.connect(tools))


def test_a_tool_must_take_an_object() -> None:
    with pytest.raises(ConfigError, match="named arguments"):
        Arguments({"type": "array"})


def test_a_definition_is_what_chat_templates_take() -> None:
    definition = ToolDefinition("say", "Says.", {"type": "object", "properties": {}})
    assert definition.openai() == {
        "type": "function",
        "function": {"name": "say", "description": "Says.", "parameters": {"type": "object", "properties": {}}},
    }


class Method:
    """A method of a handle: calls run elsewhere, and an awaitable comes back at once."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def remote(self, **arguments: Any) -> asyncio.Future[Any]:
        async def elsewhere() -> Any:
            answer = self.function(**arguments)
            return await answer if asyncio.iscoroutine(answer) else answer

        return asyncio.ensure_future(elsewhere())


class Handle:
    """As the handle of a Ray actor behaves; `tests/integration/test_generation_ray_tool.py` has a real one."""

    def __init__(self, tool: Any) -> None:
        self.describe, self.execute = Method(tool.describe), Method(tool.execute)


def test_a_handle_is_asked_and_called_from_afar() -> None:
    record = call(Handle(Say()), text="x")
    assert (record.outcome, record.output) == ("ok", "said x")


def test_a_handle_whose_actor_raises_shows_the_cause_not_the_remote_traceback() -> None:
    class Wrapped(Exception):
        cause = ValueError("not a city")

    def fails(text: str) -> str:
        raise Wrapped("ray::Tool.execute() (pid=1, ip=10.0.0.1)\n  Traceback …")

    record = call(Handle(Say(fails)), text="x")
    assert record.error == "ValueError: not a city"


def test_a_handle_whose_actor_does_not_answer_is_refused() -> None:
    class Silent(Say):
        async def describe(self) -> Any:  # type: ignore[override]
            await asyncio.sleep(3600)

    with pytest.raises(ConfigError, match="did not describe itself"):
        run(ToolSet.connect([Handle(Silent())], within=0.02))
