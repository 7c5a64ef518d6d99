"""vLLM's own tool parsers and sampling parameters, as rollouts use them. Imports vLLM; starts no engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from engines import settings
from helpers.rollouts import Say, ScriptedClient, harness, request, run, said

from instep.errors import ConfigError
from instep.generation import Harness, Limits, PromptId, PromptRequest, Sampling, ToolDefinition, ToolSet
from instep.generation.rollout import turns as rollout_module
from instep.generation.rollout.turns import rollout
from instep.generation.sampling import from_vllm
from instep.generation.tools.parsers import ChatParser, vllm_parser
from instep.generation.types import ToolCall

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

TOOL = ToolDefinition("calc", "Calculates.", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}})
HERMES = '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "s": "é"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=calc>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\né\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "calc", "parameters": {"a": 1, "s": "é"}}'
CALL = ToolCall("calc", {"a": 1, "s": "é"})

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with settings():
        yield


@cache
def tokenizer() -> Any:
    """A tokenizer of transformers with a token for every byte and the special tokens of ChatML and Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"additional_special_tokens": ["<|im_start|>", "<|python_tag|>", "<tool_call>", "</tool_call>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>", chat_template=TEMPLATE)
    made.add_special_tokens(special)
    return made


@cache
def parser(name: str) -> ChatParser:
    return vllm_parser(name, tokenizer())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES), ("hermes", f"I calculate. {HERMES}<|im_end|>"), ("qwen3_xml", QWEN), ("qwen3_xml", f"{QWEN}<|im_end|>"),
        ("qwen3_coder", QWEN), ("llama3_json", LLAMA), ("llama3_json", f"<|python_tag|>{LLAMA}"),
        ("olmo3", "<function_calls>calc(a=1, s='é')</function_calls>"), ("pythonic", "[calc(a=1, s='é')]"),
    ],
)  # fmt: skip
def test_a_call_in_a_models_own_format_is_read(name: str, text: str) -> None:
    assert parser(name).parse(text, [TOOL]) == [CALL]


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES), ("qwen3_xml", QWEN), ("llama3_json", LLAMA)])
def test_several_calls_of_one_turn_are_read_and_no_call_of_one_text_shows_up_in_the_next(name: str, text: str) -> None:
    separator = "; " if name == "llama3_json" else "\n"
    assert parser(name).parse(separator.join([text] * 3), [TOOL]) == [CALL] * 3
    assert parser(name).parse("no call", [TOOL]) == []
    assert parser(name).parse(text, [TOOL]) == [CALL]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "llama3_json", "olmo3"])
@pytest.mark.parametrize("text", ["", "The answer is 4.", "if a < b and b > c: {x}", "I would use a <tool_ but do not", "<|im_end|>"])
def test_an_answer_without_a_call_is_no_call(name: str, text: str) -> None:
    assert parser(name).parse(text, [TOOL]) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "calc", "arg'),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", f'{HERMES}<tool_call>{{"name": "calc"'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "calc", "parameters": {"a": }}'),
        ("llama3_json", "<|python_tag|>calc(a=1)"),
        ("qwen3_xml", "<tool_call>calc(1)</tool_call>"),
    ],
)
def test_a_call_that_cannot_be_read_is_one_error_for_the_model_and_no_crash(name: str, text: str) -> None:
    (call,) = parser(name).parse(text, [TOOL])
    assert call.error is not None


def test_an_argument_that_was_not_finished_is_missing_from_the_call() -> None:
    assert parser("qwen3_xml").parse("<tool_call>\n<function=calc>\n<parameter=a>\n1\n", [TOOL])[0].name == "calc"


def test_a_call_to_a_tool_that_is_not_there_is_a_call() -> None:
    assert parser("hermes").parse(HERMES.replace("calc", "fly"), [TOOL])[0].name == "fly"


def test_each_set_of_tools_is_read_with_its_own_types() -> None:
    text = "<tool_call>\n<function=calc>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    texts = ToolDefinition("calc", "", {"type": "object", "properties": {"a": {"type": "string"}}})
    assert [parser("qwen3_xml").parse(text, [tool])[0].arguments["a"] for tool in (TOOL, texts, TOOL)] == [1, "1", 1]


def test_a_parser_that_vllm_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"no tool parser 'nonsense'; it has .*hermes"):
        vllm_parser("nonsense", tokenizer())


def test_a_tokenizer_without_a_parsers_tokens_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), chat_template=TEMPLATE)
    with pytest.raises(ConfigError, match="'llama3_json' does not suit this tokenizer"):
        vllm_parser("llama3_json", bare)


class Calc:
    def describe(self) -> ToolDefinition:
        return TOOL

    async def execute(self, a: int, s: str = "") -> str:
        return f"{a} and {s}"


def test_a_rollout_has_the_tokens_that_the_chat_template_gives_the_whole_conversation() -> None:
    def encode(text: str) -> list[int]:
        return list(tokenizer().encode(text, add_special_tokens=False))

    conversation = [{"role": "user", "content": "go"}]
    prompt = encode(tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    client = ScriptedClient(said(encode(f"{HERMES}<|im_end|>")), said(encode("done<|im_end|>")))
    harness = Harness(tokenizer(), Limits(max_model_len=9999), run(ToolSet.connect([Calc()])), parser("hermes"))
    request = PromptRequest(id=PromptId("train", 0, "p"), prompt_token_ids=prompt, sampling=Sampling(max_tokens=5000))
    sample = run(rollout(request, 0, client, harness))
    conversation += [
        {"role": "assistant", "content": HERMES},
        {"role": "tool", "content": "1 and é"},
        {"role": "assistant", "content": "done"},
    ]
    assert [*prompt, *sample.token_ids] == encode(tokenizer().apply_chat_template(conversation, tokenize=False).rstrip("\n"))


def test_sampling_parameters_of_vllm_come_back_as_they_were() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = SamplingParams(
        n=4, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, seed=3, stop=["END"], stop_token_ids=[5], max_tokens=77, min_tokens=2,
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.1, bad_words=["x"], logit_bias={3: 1.0}, ignore_eos=True,
        allowed_token_ids=[1, 2, 3], structured_outputs=StructuredOutputsParams(regex="a+"), extra_args={"k": 1},
    )  # fmt: skip
    back = SamplingParams(**from_vllm(given).vllm_kwargs())
    delivery = {"logprobs", "detokenize", "skip_special_tokens", "output_text_buffer_length"}
    for name in set(given.__struct_fields__) - delivery:
        assert getattr(back, name) == getattr(given, name), name
    assert (back.logprobs, back.detokenize, back.skip_special_tokens) == (0, True, False)


def test_default_sampling_of_rollouts_is_vllms_but_for_its_length() -> None:
    from vllm import SamplingParams

    assert from_vllm(SamplingParams(max_tokens=256)) == Sampling()


def test_what_no_sample_has_a_place_for_is_refused() -> None:
    from vllm import SamplingParams

    with pytest.raises(ConfigError, match="prompt_logprobs"):
        from_vllm(SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml"])
def test_a_turn_that_a_parser_reads_for_minutes_is_a_call_that_cannot_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "READING", 0.2)
    client = ScriptedClient(said("<function=say><parameter=text>" * 3000), said("ok"))
    made = harness(Say(), parser=parser(name), max_model_len=200_000)
    sample = run(rollout(request(max_tokens=150_000), 0, client, made))
    assert [record.error for record in sample.tools] == ["the tool call could not be read in 0.2 seconds"]
    assert (sample.finish_reason, sample.turns) == ("stop", 2)


def test_a_text_full_of_names_is_searched_for_a_call_once() -> None:
    """In time that grows with its square, this would take minutes."""
    assert parser("hermes").parse('{"name":' * 50_000, [Say().describe()]) == []
