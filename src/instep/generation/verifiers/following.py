"""IFEval's instructions as functions of a text, with IFEval's names of arguments. Each takes
time linear in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

PLACEHOLDER = re.compile(r"\[[^\[\]\n]++\]")
HIGHLIGHT, BOLD = re.compile(r"\*([^\n*]*+)\*"), re.compile(r"\*\*([^\n*]*+)\*\*")
BULLET = re.compile(r"[ \t]*+(?:\*[^*]|-(?!-))")
POSTSCRIPTS = {"P.S.": re.compile(r"\bp\.\s?s\."), "P.P.S": re.compile(r"\bp\.\s?p\.\s?s")}
ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
ABBREVIATIONS = frozenset(
    """mr mrs ms dr prof sr jr st vs etc eg ie e.g i.e cf approx inc ltd co corp u.s u.k a.m p.m ph.d
    gen col capt sgt rev hon""".split()  # noqa: SIM905
)
LAST = frozenset("etc inc ltd co corp jr sr a.m p.m u.s u.k".split())  # noqa: SIM905
"""Abbreviations that may be the last word of a sentence."""
ENDS = (".", "!", "?", "…", "。", "！", "？")
CLOSING = "\"'”’)]*_»"


def compared(count: int, relation: str, bound: int) -> bool:
    """Whether a count is `less than` or `at least` a bound. Raises `ValueError` for another relation."""
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")
    return count < bound if relation == "less than" else count >= bound


def sentences(text: str) -> int:
    """Counts the sentences of a text. A line without a full stop at its end goes on in the next
    line, unless an empty line follows."""
    count = 0
    for block in re.split(r"\n[ \t]*+\n", text):
        open_ = False
        words = block.split()
        for word, following in zip(words, [*words, ""][1:], strict=True):
            bare = word.rstrip(CLOSING)
            open_ = True
            if bare.endswith(ENDS) and not _goes_on(bare, following):
                count, open_ = count + 1, False
        count += open_
    return count


def _goes_on(word: str, following: str) -> bool:
    """Whether a word's full stop belongs to an abbreviation, an initial or a list number, and
    ends no sentence."""
    if not following or not word.endswith("."):
        return False
    stem = word.lstrip("\"'“‘([*_").removesuffix(".")
    if stem.isdigit() and len(stem) < 3:
        return True
    if stem.lower() in LAST or stem.endswith("."):
        return following[:1].islower()
    if stem.lower() in ("no", "fig", "vol"):
        return following[:1].isdigit()
    return stem.lower() in ABBREVIATIONS or (len(stem) == 1 and stem.isupper() and stem != "I")


def with_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.strip().lower() in text.lower() for keyword in keywords)


def with_a_keyword_so_often(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return compared(text.lower().count(keyword.strip().lower()), relation, frequency)


def without_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def with_a_letter_so_often(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return compared(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def of_sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    return compared(sentences(text), relation, num_sentences)


def of_divided_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Whether a text has so many paragraphs, divided by `***`, none of them empty."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]
    return all(inner) and len(inner) == num_paragraphs


def of_words(text: str, num_words: int, relation: str = "at least") -> bool:
    return compared(sum(1 for _ in re.finditer(r"\w++", text)), relation, num_words)


def with_a_paragraph_that_starts(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 0 < nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("\"'“‘*_#([")
    return re.split(r"[.,?!'\"’”:;*_)\]]", word, maxsplit=1)[0].lower() == first_word.strip().lower()


def with_placeholders(text: str, num_placeholders: int) -> bool:
    return len(PLACEHOLDER.findall(text)) >= num_placeholders


def with_a_postscript(text: str, postscript_marker: str) -> bool:
    pattern = POSTSCRIPTS.get(postscript_marker.strip())
    return pattern.search(text.lower()) is not None if pattern else postscript_marker.strip().lower() in text.lower()


def of_bullets(text: str, num_bullets: int) -> bool:
    return sum(BULLET.match(line) is not None for line in text.splitlines()) == num_bullets


def one_of_three_answers(text: str) -> bool:
    return any(one in text.lower() for one in ANSWERS)


def with_highlights(text: str, num_highlights: int) -> bool:
    return sum(bool(found.strip()) for pattern in (HIGHLIGHT, BOLD) for found in pattern.findall(text)) >= num_highlights


def of_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d", text)) >= num_sections


def json_alone(text: str) -> bool:
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.removesuffix("```").removeprefix("```")
        text = text[4:] if text[:4].lower() == "json" else text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def with_a_title(text: str) -> bool:
    for line in text.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> "):
            return True
    return False


def two_responses(text: str) -> bool:
    """Whether a text is two different responses, divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    inner = parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeating_the_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ending_so(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"”').strip().lower().endswith(end_phrase.strip().strip('"').lower())


def in_quotes(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and (text[0], text[-1]) in (('"', '"'), ("“", "”"))


def with_capital_words(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    words = sum(word.isupper() for word in text.split())
    return compared(words, capital_relation, capital_frequency)


def without_commas(text: str) -> bool:
    return not any(comma in text for comma in ",，")
