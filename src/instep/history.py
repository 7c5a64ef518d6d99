"""Versions that were served or pushed, by label."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

T = TypeVar("T")
KEPT = 1 << 16
"""Versions that are remembered: about 10 MB at the most."""


class History(OrderedDict[str, T]):
    """The last `KEPT` versions, from the oldest to the newest, each with what is known of it."""

    def __setitem__(self, version: str, known: T) -> None:
        super().__setitem__(version, known)
        self.move_to_end(version)
        if len(self) > KEPT:
            self.popitem(last=False)
