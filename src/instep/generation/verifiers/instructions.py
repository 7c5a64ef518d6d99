"""Judges whether an answer follows the instructions of IFEval (Zhou et al., 2023), which a
program can check."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.extras import needed_by
from instep.generation.verifiers import following
from instep.generation.verifiers.base import Answer, reading

Check = Callable[..., bool]
LANGUAGE = 10_000
"""Characters in which a language is looked for."""
ONE = threading.Lock()
"""langdetect is not made for threads: it loads what it needs at its first use."""


@dataclass(frozen=True)
class Instructions:
    """Scores an answer by the fraction of its instructions that it follows. Text before
    `</think>` is no part of the answer, nor are `<answer>` tags.

    The label has IFEval's fields, as an object or as JSON: `{"instruction_id_list":
    ["punctuation:no_comma"], "kwargs": [{}]}`, or a list of one such object, also with the name
    `instruction_id`. Languages are told apart by langdetect.

    threshold: a smaller part than this scores 0.
    """

    threshold: float = 1.0

    async def __call__(self, answer: Answer, value: Any) -> float:
        checks = read_label(value)

        def followed(text: str) -> int:
            return sum(bool(text) and check(text, **kwargs) for check, kwargs in checks)

        part = await reading(followed, said(answer.text)) / len(checks)
        return part if part >= self.threshold else 0.0


def said(text: str) -> str:
    """Returns the part of an answer that its reader sees."""
    text = text.replace("\r\n", "\n").rpartition("</think>")[2].strip()
    if text.startswith("<answer>") and text.endswith("</answer>"):
        text = text.removeprefix("<answer>").removesuffix("</answer>")
    return text.strip()


def read_label(value: Any) -> list[tuple[Check, dict[str, Any]]]:
    """Returns the checks that a label asks for, each with its arguments. Raises `ValueError` for
    a label that is not IFEval's."""
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        raise ValueError(f"the label is a {type(value).__name__}, not an object with instruction_id_list and kwargs")
    names = value.get("instruction_id_list") or value.get("instruction_id") or ()
    given: Sequence[Any] = value.get("kwargs") or [None] * len(names)
    if not names or len(names) != len(given):
        raise ValueError(f"the label has {len(names)} instructions and {len(given)} kwargs")
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"there is no instruction {', '.join(map(str, unknown))}")
    arguments = [{key: one for key, one in (kwargs or {}).items() if one is not None} for kwargs in given]
    return [(CHECKS[name], kwargs) for name, kwargs in zip(names, arguments, strict=True)]


def in_language(text: str, language: str) -> bool:
    """Whether langdetect finds this language the likeliest. A text without letters is in every
    language."""
    with needed_by("Instructions"):
        import langdetect
    with ONE:
        langdetect.DetectorFactory.seed = 0  # else it draws lots
        try:
            found = str(langdetect.detect(text[:LANGUAGE].lower()))
        except langdetect.LangDetectException:
            return True
    return found.split("-")[0] == language.split("-")[0]


CHECKS = following.CHECKS | {
    "language:response_language": in_language,
    "change_case:english_capital": lambda text: text.isupper() and in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and in_language(text, "en"),
}
