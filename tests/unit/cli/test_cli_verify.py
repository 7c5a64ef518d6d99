"""The verdict of `instep verify` on one engine, and the exit code on several."""

from __future__ import annotations

import pytest

from instep.cli.checkpoints import CANARY_BOUND
from instep.cli.verify import exit_code, word
from instep.errors import EngineLost, InstepError
from instep.verify import Verified

WHY = {"w": "the engine keeps it in a layout of its own"}


def verified(**found: object) -> Verified:
    return Verified("gpu1", "v1", **{"dirty": False, "equal": 2, **found})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "equal"),
        ({"canary_gap": CANARY_BOUND}, "equal"),
        ({"unread": WHY}, "not all compared"),
        ({"unread": WHY, "equal": 0}, "not all compared"),
        ({"unread": WHY, "canary_gap": 0.1}, "equal"),
        ({"unread": WHY, "canary_gap": CANARY_BOUND * 2}, "differs"),
        ({"canary_gap": float("nan")}, "differs"),
        ({"unread": WHY, "differing": {"v": "digest"}, "canary_gap": 0.1}, "differs"),
        ({"dirty": True}, "differs"),
    ],
)
def test_only_what_was_compared_or_agrees_is_equal(found: dict[str, object], said: str) -> None:
    assert word(verified(**found)) == said


EQUAL, PART, OTHER, LOST = verified(), verified(unread=WHY), verified(differing=WHY), EngineLost("gpu2 is gone")


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([EQUAL], 0),
        ([EQUAL, EQUAL], 0),
        ([PART], 5),
        ([EQUAL, PART], 5),
        ([LOST], 1),
        ([LOST, LOST], 1),
        ([LOST, EQUAL], 3),
        ([LOST, PART], 3),
        ([LOST, OTHER], 4),
        ([PART, OTHER], 4),
    ],
)
def test_the_exit_code_is_that_of_the_worst(results: list[Verified | InstepError], code: int) -> None:
    assert exit_code(results) == code
