"""Rewards and questions of the demo."""

from __future__ import annotations

from itertools import islice

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from instep.demo import task
from instep.demo.task import CAPITALS, HELD_OUT, Task

CHARACTERS = sorted(
    {character for text in ("What is the capital of?.\nuserassistant", *CAPITALS, *CAPITALS.values()) for character in text}
)


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Capitals, with a tokenizer of single characters."""
    words = ["<unk>", *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return task.capitals(directory)


def tokens(lesson: Task, text: str) -> list[int]:
    characters = {character: token for token, character in enumerate(["<unk>", *CHARACTERS])}
    return [characters[character] for character in text]


@pytest.mark.parametrize(
    ("reply", "ends", "reward"),
    [
        ("The capital is Paris.", True, 1.0),
        ("Paris", True, 1.0),
        ("The capital is Paris.", False, 0.0),
        ("The capital is Rome.", True, 0.0),
        ("Parisian", True, 0.0),
        ("paris", True, 0.0),
    ],
)
def test_a_reply_is_right_when_it_names_the_capital_and_ends(lesson: Task, reply: str, ends: bool, reward: float) -> None:
    france = lesson.questions[0]
    assert france.answer == "Paris"
    assert lesson.grade(france, tokens(lesson, reply) + lesson.stop_token_ids * ends) == reward


def test_a_question_is_a_chat_that_waits_for_the_reply(lesson: Task) -> None:
    france = lesson.questions[0]
    assert lesson.read(france.prompt).startswith("user\nWhat is the capital of France?")
    assert lesson.read(france.prompt).endswith("assistant\n")
    assert france.prompt.count(lesson.stop_token_ids[0]) == 1


def test_no_country_is_both_trained_on_and_held_out() -> None:
    assert not CAPITALS.keys() & HELD_OUT.keys()
    assert not set(CAPITALS.values()) & set(HELD_OUT.values())


def test_small_tokens_are_counted() -> None:
    lesson = task.small_tokens(vocabulary=256, seed=0)
    question = lesson.questions[0]
    assert lesson.grade(question, [0, 63, 64, 255]) == 0.5
    assert "below 64" in lesson.reward
    assert not {question.text for question in lesson.questions} & {question.text for question in lesson.held_out}


def test_each_round_asks_every_question_once_in_an_order_that_the_seed_gives() -> None:
    questions = task.small_tokens(vocabulary=256, seed=0).questions

    def rounds(seed: int) -> list[list[str]]:
        batches = list(islice(task.batches(questions, 8, seed), 4))
        asked = [question.text for batch in batches for question in batch]
        return [asked[:16], asked[16:]]

    first, second = rounds(0)
    assert sorted(first) == sorted(second) == sorted(question.text for question in questions)
    assert first != second
    assert rounds(0) == [first, second]
    assert rounds(1) != [first, second]
