"""Verifiers: which answers are right."""

from __future__ import annotations

from fractions import Fraction
from inspect import signature
from typing import Any

import pytest
from helpers.rollouts import request, run
from helpers.sample_records import sample
from hypothesis import given
from hypothesis import strategies as st

from instep.generation.verifiers import (
    Answer,
    ExactMatch,
    Format,
    Instructions,
    Numeric,
    WordOverlap,
    code_block,
    final,
    last_number,
)
from instep.generation.verifiers.instructions import CHECKS


def answer(text: str) -> Answer:
    return Answer(text, sample([]), request())


def score(verifier: Any, text: str, value: Any) -> float:
    return run(verifier(answer(text), value))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_thoughts_then_an_answer_and_nothing_else(text: str, fits: float) -> None:
    assert score(Format(), text, None) == fits


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("The  Moon.", "moon", 1.0), ("a cat", ["dog", "the cat"], 1.0), ("catalogue", "cat", 0.0), ("", "moon", 0.0),
        ("it is \\boxed{Paris}", "paris", 1.0), ("<answer>Paris</answer>", "paris", 1.0), ("Paris, I say", "paris", 0.0),
    ],
)  # fmt: skip
def test_an_exact_match_ignores_case_articles_punctuation_and_space(text: str, value: Any, right: float) -> None:
    assert score(ExactMatch(), text, value) == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no", "no"), ("x \\boxed{1} y \\boxed{\\frac{1}{2}} z", "\\frac{1}{2}"), ("\\boxed{a", "a"),
        ("<answer>1</answer> <answer>2</answer>", "2"), ("<answer>\\boxed{3}</answer>", "3"), ("<answer> 4", "4"),
    ],
)  # fmt: skip
def test_the_final_answer_is_the_last_one(text: str, answer: str) -> None:
    assert final(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5 apples", "1234.5"), ("-3/4", "-3/4"), ("6e-3", "3/500"), ("10-3", "3"), ("from 7 to -8", "-8"), (".5", "1/2"),
        ("3.", "3"), ("so it is 42.", "42"), ("12,34", "34"), ("1.5/2", "3/4"), ("v2", "2"), ("(2)-1", "1"), ("= -1", "-1"),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Fraction(number)


@given(st.text(alphabet="0123456789.,-/eE ()x", max_size=60))
def test_no_text_breaks_the_search_for_a_number(text: str) -> None:
    last_number(text)


@pytest.mark.parametrize("text", ["none", "9" * 5000, "1e9999999", ""])
def test_what_is_no_number_or_none_to_compute_with_is_no_answer(text: str) -> None:
    assert score(Numeric(), text, "5") == 0.0


def test_a_division_by_zero_is_no_number() -> None:
    assert last_number("1/0") is None


ARGUMENTS = {
    "keywords": ["a"], "keyword": "a", "frequency": 3, "relation": "at least", "forbidden_words": ["never"], "letter": "a",
    "let_frequency": 3, "language": "en", "num_sentences": 2, "num_paragraphs": 2, "num_words": 2, "nth_paragraph": 1, "first_word": "a",
    "num_placeholders": 2, "postscript_marker": "P.S.", "num_bullets": 2, "num_highlights": 2, "section_spliter": "Section",
    "num_sections": 2, "prompt_to_repeat": "a", "end_phrase": "a", "capital_frequency": 2,
}  # fmt: skip
EVERY = {
    "instruction_id_list": list(CHECKS),
    "kwargs": [{key: value for key, value in ARGUMENTS.items() if key in signature(check).parameters} for check in CHECKS.values()],
}


@pytest.mark.parametrize(
    "text",
    [
        ",111", "1", "1 ", "1/", "1.", "\\frac{", "\\text{", "$", "-", "(", "a^1", "1e1", "1\\,", " ", "= ", "1\\times 10^", "\\boxed{",
        "<answer>", "</think>", "</think><answer></answer>", "</think>" + " " * 50, "<<", "[", "*", "a. ", "P.S", "½", "{",
        "the answer is ", "Section", "\n", "1" + " " * 50, "<", "\\", "\\left(", "\\frac{1}{", "```py\n", "```", "~",
        "\u0301\u0323", "\u0f73",
        "\\text{\u0301\u0323}", "\ufdfa", "http://", "a@a.", "1,", '{"a":', "\n ", "\u0345\u0301",
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.timeout(60)  # what is quadratic takes minutes
def test_no_text_keeps_a_verifier_longer_than_its_length_says(text: str) -> None:
    text = (text * (160_000 // len(text) + 1))[:160_000]
    for verifier, label in ((Numeric(), "5"), (ExactMatch(), "x"), (WordOverlap(), "x"), (Format(), None), (Instructions(), EVERY)):
        score(verifier, "<think>" + text + "x", label)
        score(verifier, "<answer>" + text, label)
    code_block(text)


@pytest.mark.parametrize("line", ["```" + " " * 160_000 + "`", "~" * 160_000 + "`", "`" * 160_000 + "x`", " " * 160_000 + "`"])
@pytest.mark.timeout(60)
def test_no_line_keeps_the_search_for_a_program_longer_than_its_length_says(line: str) -> None:
    assert code_block(line + "\nx") == line + "\nx"


def test_text_with_long_runs_of_marks_equals_itself_in_either_order_of_few() -> None:
    marks = "\u0301\u0323" * 200
    assert score(ExactMatch(), "a" + marks, "a" + marks) == 1.0
    assert score(ExactMatch(), "a\u0301\u0323" * 50, "a\u0323\u0301" * 50) == 1.0


def test_numbers_are_equal_exactly_or_within_the_tolerance() -> None:
    assert score(Numeric(), "#### 1,000", "1000.0") == 1.0
    assert score(Numeric(), "0.1", 0.1) == 1.0
    assert score(Numeric(), "3.14", "3.14159") == 0.0
    assert score(Numeric(0.01), "3.14", "3.14159") == 1.0
    assert score(Numeric(0.01), "-3.14", "3.14159") == 0.0


def test_a_label_without_a_number_breaks_the_verifier() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        score(Numeric(), "1", "one")


@pytest.mark.parametrize("verifier", [ExactMatch(), WordOverlap()])
def test_letters_that_stand_for_eighteen_do_not_make_a_long_answer_longer_than_it_may_be(verifier: Any) -> None:
    text = "\ufdfa" * 1_000_000
    assert score(verifier, f"<answer>{text}</answer>", "five") == 0.0
    assert score(verifier, f"<answer>{text[:1000]}</answer>", text[:1000]) == 1.0
