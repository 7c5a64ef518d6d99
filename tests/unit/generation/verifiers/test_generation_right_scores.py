"""Whether a verifier says of an answer what a person would: the answers stand in `right_scores.tsv`.

There `⏎` is the end of a line, and `␍` a carriage return before it. Columns are parted by tabs:
the verifier, the right score, the label, the answer.
"""

from __future__ import annotations

import asyncio
import csv
from pathlib import Path
from typing import Any

import pytest
from helpers.rollouts import request
from helpers.sample_records import sample

from instep.generation import Answer, ExactMatch, Instructions, Maths, Numeric

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'instep[generation]'")
pytest.importorskip("langdetect", reason="langdetect is not installed: pip install 'instep[generation]'")

TABLE = Path(__file__).with_name("right_scores.tsv")
VERIFIERS: dict[str, Any] = {"numeric": Numeric(), "maths": Maths(), "exact": ExactMatch(), "instructions": Instructions()}


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{key: value.replace("⏎", "\n").replace("␍", "\r") for key, value in row.items()} for row in table]


def test_there_are_enough_answers_of_each_verifier() -> None:
    names = [row["verifier"] for row in rows()]
    assert len(names) >= 400
    assert all(names.count(name) >= 30 for name in VERIFIERS)


@pytest.mark.parametrize("name", VERIFIERS)
def test_scores_are_those_that_a_person_would_give(name: str) -> None:
    async def main() -> list[str]:
        mine = [row for row in rows() if row["verifier"] == name]
        scores = await asyncio.gather(
            *(VERIFIERS[name](Answer(row["answer"], sample([]), request()), row["label"]) for row in mine), return_exceptions=True
        )
        wrong = [(row, score) for row, score in zip(mine, scores, strict=True) if score != float(row["right"])]
        return [f"{row['answer']!r} for {row['label']!r}: {score!r}, not {row['right']}" for row, score in wrong]

    assert asyncio.run(asyncio.wait_for(main(), 200.0)) == []
