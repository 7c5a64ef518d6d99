"""IFEval's instructions as functions of a text, with IFEval's names of arguments. Each takes
time linear in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

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
LEAST = "at least"
CLOSING = "\"'”’)]*_»"


def compared(count: int, relation: str, bound: int) -> bool:
    """Whether a count is `less than` or `at least` a bound. Raises `ValueError` for another
    relation."""
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


def with_a_paragraph_that_starts(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 0 < nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("\"'“‘*_#([")
    return re.split(r"[.,?!'\"’”:;*_)\]]", word, maxsplit=1)[0].lower() == first_word.strip().lower()


def with_a_postscript(text: str, postscript_marker: str) -> bool:
    pattern = POSTSCRIPTS.get(postscript_marker.strip())
    return pattern.search(text.lower()) is not None if pattern else postscript_marker.strip().lower() in text.lower()


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


def in_quotes(text: str) -> bool:
    text = text.strip()
    return len(text) > 2 and (text[0], text[-1]) in (('"', '"'), ("“", "”"))


def divided(text: str, mark: str) -> list[str]:
    """Returns the parts of a text between marks. What is empty at its ends is none."""
    parts = [part.strip() for part in text.split(mark)]
    return parts[not parts[0] : len(parts) - (not parts[-1] and len(parts) > 1)]


def two_responses(text: str) -> bool:
    parts = divided(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(keyword.strip().lower() in text.lower() for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=LEAST: compared(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=LEAST: compared(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation=LEAST: compared(sentences(text), relation, num_sentences),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        all(parts := divided(text, "***")) and len(parts) == num_paragraphs
    ),
    "length_constraints:number_words": lambda text, num_words, relation=LEAST: compared(
        sum(1 for _ in re.finditer(r"\w++", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": with_a_paragraph_that_starts,
    "detectable_content:number_placeholders": lambda text, num_placeholders: len(PLACEHOLDER.findall(text)) >= num_placeholders,
    "detectable_content:postscript": with_a_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        sum(BULLET.match(line) is not None for line in text.splitlines()) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(one in text.lower() for one in ANSWERS),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(found.strip()) for pattern in (HIGHLIGHT, BOLD) for found in pattern.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d", text)) >= num_sections
    ),
    "detectable_format:json_format": json_alone,
    "detectable_format:title": with_a_title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"”').strip().lower().endswith(end_phrase.strip().strip('"').lower())
    ),
    "startend:quotation": in_quotes,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=LEAST: compared(
        sum(word.isupper() for word in text.split()), capital_relation, capital_frequency
    ),
    "punctuation:no_comma": lambda text: not any(comma in text for comma in ",，"),
}
"""Whether a text follows an instruction, by its name. Arguments have IFEval's names."""
