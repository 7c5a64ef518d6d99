"""Keepers at a level of the tests' own choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from instep.generation.sandbox import kept
from instep.generation.sandbox.kept import Keeper
from instep.generation.sandbox.programs import Level, trial


@contextmanager
def at(level: Level) -> Iterator[Keeper]:
    """Programs run at this level. Skips a test where this machine does not give it."""
    keeper = keeper_at(level)
    if isinstance(keeper, str):
        pytest.skip(f"this machine gives no {level} sandbox: {keeper}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "_kept", keeper)
        yield keeper


@cache
def keeper_at(level: Level) -> Keeper | str:
    """A keeper, or why there is none."""
    try:
        keeper = Keeper(level)
    except OSError as error:
        return str(error)
    return trial(keeper.start) or keeper
