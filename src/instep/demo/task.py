"""Questions whose answers a few lines of code can grade, and that a small model can learn in a
dozen steps."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAM_SAMPLES = 4
"""Completions for each question that is never trained on."""
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Greece": "Athens",
    "Russia": "Moscow", "Japan": "Tokyo", "China": "Beijing", "Egypt": "Cairo", "England": "London", "Ireland": "Dublin",
    "Austria": "Vienna", "Hungary": "Budapest", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Belgium": "Brussels", "Cuba": "Havana", "Peru": "Lima", "Canada": "Ottawa", "Kenya": "Nairobi",
}  # fmt: skip
HELD_OUT = {
    "Thailand": "Bangkok", "Scotland": "Edinburgh", "Mexico": "Mexico City", "Argentina": "Buenos Aires",
    "Iraq": "Baghdad", "Romania": "Bucharest", "Chile": "Santiago", "Vietnam": "Hanoi",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    text: str
    prompt: list[int]
    answer: str = ""


@dataclass(frozen=True)
class Task:
    """A lesson of the demo.

    reward: what `grade` checks, in a sentence. `grade` takes a question and the tokens of a reply,
    and gives 0 to 1.
    canary: token ids that engine and trainer both score after each push.
    batch, samples: questions for each step, and completions for each question.
    """

    reward: str
    questions: list[Question]
    held_out: list[Question]
    grade: Callable[[Question, Sequence[int]], float]
    read: Callable[[Sequence[int]], str]
    canary: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    batch: int
    samples: int
    learning_rate: float


def capitals(checkpoint: Path) -> Task:
    """Makes the lesson in which a chat model names capitals. `checkpoint` holds the tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids

    def question(country: str, capital: str) -> Question:
        text = f"What is the capital of {country}?"
        chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return Question(text, tokenizer.encode(chat, add_special_tokens=False).ids, capital)

    def read(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def grade(question: Question, tokens: Sequence[int]) -> float:
        named = re.search(rf"\b{question.answer}\b", read(tokens)) is not None
        return float(named and tokens[-1] == end)

    questions = [question(*pair) for pair in CAPITALS.items()]
    return Task(
        reward="1 for a reply that names the capital and ends by itself within 10 tokens, else 0",
        questions=questions,
        held_out=[question(*pair) for pair in HELD_OUT.items()],
        grade=grade,
        read=read,
        canary=questions[0].prompt + tokenizer.encode("The capital of France is Paris.", add_special_tokens=False).ids,
        max_tokens=10,
        stop_token_ids=[end],
        batch=6,
        samples=8,
        learning_rate=1e-5,
    )


def small_tokens(vocabulary: int, seed: int) -> Task:
    """Makes the lesson in which a random model, without a tokenizer, learns which tokens are
    wanted."""
    rng = random.Random(seed)
    bound = vocabulary // 4
    prompts = [[rng.randrange(vocabulary) for _ in range(8)] for _ in range(24)]
    questions = [Question(" ".join(map(str, prompt)), prompt) for prompt in prompts]
    return Task(
        reward=f"the share of a reply's tokens that are below {bound}",
        questions=questions[:16],
        held_out=questions[16:],
        grade=lambda _, tokens: sum(token < bound for token in tokens) / len(tokens),
        read=lambda tokens: " ".join(map(str, tokens)),
        canary=prompts[0] + prompts[1],
        max_tokens=8,
        stop_token_ids=[],
        batch=8,
        samples=8,
        learning_rate=1e-2,
    )


def batches(questions: Sequence[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """Yields batches without end. The questions come in a new order each time round."""
    rng = random.Random(seed)
    queue: list[Question] = []
    while True:
        while len(queue) < size:
            queue += rng.sample(questions, len(questions))
        batch, queue = queue[:size], queue[size:]
        yield batch
