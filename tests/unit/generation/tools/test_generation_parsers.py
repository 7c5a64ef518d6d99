"""Parsers: what is a call, what stops a turn, and how the model is shown what came of it."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from helpers.rollouts import TOKENIZER, Tokenizer, decode, encode
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import ConfigError
from instep.generation import ToolDefinition
from instep.generation.tools.parsers import ChatParser, TaggedParser, WholeTurnParser, main_argument, vllm_parser
from instep.generation.types import ToolCall, ToolRecord


def tool(name: str, *properties: str, required: tuple[str, ...] = ()) -> ToolDefinition:
    return ToolDefinition(name, "", {"type": "object", "properties": {each: {} for each in properties}, "required": list(required)})


CODE, SEARCH = tool("code", "language", "program", required=("program",)), tool("search", "query")
TAGGED = TaggedParser(TOKENIZER)


def record(output: str = "", **fields: Any) -> ToolRecord:
    return ToolRecord(**{"tool": "code", "turn": 0, "outcome": "ok", "output": output, **fields})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no calls", []),
        ("<code>1+1</code>", [("code", "1+1")]),
        ("<code>\nfor x in y:\n  pass\n</code> then", [("code", "for x in y:\n  pass")]),
        ("<search>b</search> <code>a</code> <search>c</search>", [("search", "b"), ("code", "a"), ("search", "c")]),
        ("<code>a</code><code>b</code>", [("code", "a"), ("code", "b")]),
        ("<code>never closed", []),
        ("<code>a <search>q</search>", [("search", "q")]),
        ("<code><search>q</search></code>", [("code", "<search>q</search>")]),
        ("</code><other>x</other>", []),
        ("<code></code>", [("code", "")]),
        ("a < b > c </code>", []),
    ],
)
def test_tagged_calls_are_found_in_the_order_of_the_text(text: str, calls: list[tuple[str, str]]) -> None:
    arguments = {"code": "program", "search": "query"}
    assert TAGGED.parse(text, [CODE, SEARCH]) == [ToolCall(name, {arguments[name]: content}) for name, content in calls]


@given(st.lists(st.sampled_from(["<code>", "</code>", "<search>", "</search>", "x", "\n"]), max_size=30))
def test_a_tagged_call_is_always_a_piece_of_the_text(words: list[str]) -> None:
    text = "".join(words)
    for call in TAGGED.parse(text, [CODE, SEARCH]):
        assert f"<{call.name}>" in text
        assert str(next(iter(call.arguments.values()))) in text


def test_thousands_of_open_tags_take_no_longer_than_the_text_is() -> None:
    assert TAGGED.parse("<code>" * 200_000, [CODE, SEARCH]) == []  # a search from each of them to the end would take minutes


def test_a_tagged_call_goes_to_the_first_required_argument_else_the_first_else_text() -> None:
    assert [main_argument(each) for each in (CODE, SEARCH, tool("bare"))] == ["program", "query", "text"]


def test_a_tagged_turn_stops_where_a_call_ends() -> None:
    assert TAGGED.stops([CODE, SEARCH]) == ("</code>", "</search>")
    assert TAGGED.stops([]) == ()


def test_tagged_output_is_a_block_for_each_call() -> None:
    shown = decode(TAGGED.observe([record("1"), record("2", error="but late")], 0))
    assert shown == "\n<output>\n1\n</output>\n<output>\n2\nError: but late\n</output>\n"


def test_a_whole_turn_goes_to_its_tool_where_a_marker_occurs() -> None:
    parser = WholeTurnParser("search", TaggedParser(TOKENIZER, "tool_output"), ["</call>", "<done>", "</call>"])
    assert parser.stops([CODE, SEARCH]) == ("</code>", "</call>", "<done>")
    assert parser.stops([CODE]) == ("</code>",)
    assert parser.parse("think <call>x</call>", [SEARCH]) == [ToolCall("search", {"query": "think <call>x</call>"})]
    assert parser.parse("<search>x</search>", [SEARCH]) == []
    assert decode(parser.observe([record("1")], 0)) == "\n<tool_output>\n1\n</tool_output>\n"


def test_an_environment_that_listens_hears_every_turn_after_the_calls_in_it() -> None:
    parser = WholeTurnParser("search", TAGGED)
    assert parser.parse("go <code>1</code>", [CODE, SEARCH]) == [
        ToolCall("code", {"program": "1"}), ToolCall("search", {"query": "go <code>1</code>"}),
    ]  # fmt: skip
    assert parser.parse("go", [CODE]) == []


def chat(found: Any = (), **settings: Any) -> ChatParser:
    return ChatParser(TOKENIZER, lambda text, tools: found(text) if callable(found) else found, **settings)


def test_chat_calls_come_with_their_arguments_read() -> None:
    assert chat([("code", '{"program": "1"}'), ("search", '"{\\"query\\": 2}"')]).parse("", []) == [
        ToolCall("code", {"program": "1"}), ToolCall("search", {"query": 2}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "not list"), ("null", "not NoneType"), ('"x"', "JSON")],
)
def test_chat_arguments_that_are_no_json_object_are_an_error_of_the_call(arguments: str, words: str) -> None:
    (call,) = chat([("code", arguments)]).parse("", [])
    assert (call.name, call.arguments) == ("code", {})
    assert words in str(call.error)


def test_a_call_that_the_parser_cannot_read_is_an_error_of_a_call_without_a_name() -> None:
    (call,) = chat(None).parse("<tool_call>{", [])
    assert "could not be read" in str(call.error)


def test_what_a_model_thinks_of_calling_is_no_call() -> None:
    def extract(text: str) -> list[tuple[str, str]]:
        return [("code", "{}")] * text.count("<call>")

    text = "<think><call> or <call>?</think><call>"
    assert len(chat(extract).parse(text, [])) == 3
    assert len(chat(extract, reasoning_end="</think>").parse(text, [])) == 1
    assert len(chat(extract, reasoning_end="</think>").parse("<call>", [])) == 1


TEMPLATED = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "say<call>"},
    {"role": "tool", "content": "42", "name": "code"},
]


@pytest.mark.parametrize("ended", [True, False], ids=["by its end token", "by a stop string"])
def test_a_chat_with_an_observation_has_the_tokens_that_the_template_would_have_given_it(ended: bool) -> None:
    prompt = TOKENIZER.apply_chat_template(TEMPLATED[:1], tokenize=False, add_generation_prompt=True)
    turn = encode("say<call>" + "<|end|>" * ended)
    rolled = [*encode(prompt), *turn, *chat().observe([record("42")], turn[-1])]
    whole = TOKENIZER.apply_chat_template(TEMPLATED, tokenize=False, add_generation_prompt=True)
    assert rolled == encode(whole)  # the newline between two turns included


def test_observations_keep_their_roles() -> None:
    shown = decode(chat().observe([record("a"), record("b", role="user")], 1))
    assert shown == "\n<|user|>tool:a<|end|>\n<|user|>b<|end|>\n<|model|>"


def test_what_a_tool_says_is_not_mistaken_for_what_the_template_says() -> None:
    assert "instep" in decode(chat().observe([record("\u2063instep\u2063")], 1))


class NoTools(Tokenizer):
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        if messages[-1]["role"] == "tool":
            raise ValueError("unknown role")
        return ""


class Deaf(Tokenizer):
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return super().apply_chat_template(messages[:2], **kwargs)


@pytest.mark.parametrize(("tokenizer", "words"), [(NoTools(), "unknown role"), (Deaf(), "leaves out"), (object(), "does not take")])
def test_a_template_that_cannot_show_a_tools_answer_is_refused_at_once(tokenizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatParser(tokenizer, lambda text, tools: [])


def test_without_vllm_its_parsers_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("vllm"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="vLLM's tool parsers cannot be imported"):
        vllm_parser("hermes", TOKENIZER)
