"""What one step of a push hands to the next: an `Attempt` goes through them, and each step gives a
value that does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from instep.engine.member import Member
from instep.receipt import EngineReceipt
from instep.source import Look

AttemptName = Literal["trusted", "asked", "another transport"]
"""trusted: engines are taken to be as the last push has left them. asked: each has said what it
serves. another transport: what was published could not be opened by all of them."""


@dataclass(frozen=True)
class Attempt:
    """Engines that are to take the version. found: the last look at the source, if still
    current."""

    name: AttemptName
    members: Sequence[Member]
    found: Look | None = None


@dataclass(frozen=True)
class Ready:
    """Engines that can commit. fused: whether prepare and commit are one call, which takes a single
    engine."""

    members: Sequence[Member]
    fused: bool


@dataclass(frozen=True)
class TurnedDown:
    """Engines keep what they serve. why: one is not as the last push left it, or cannot open what
    was published."""

    why: Literal["not as left", "not reached"]


@dataclass(frozen=True)
class Done:
    """Receipts of the engines that now serve the version, by their names."""

    engines: Mapping[str, EngineReceipt]
