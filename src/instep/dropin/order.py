"""The order in which a trainer's tensors come tells what they are, where the trainer does not say it. Pure functions of names.

A trainer sends its weights in one order, again and again. So tensors that come while that order has not
begun are some weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence


class Order:
    """full: the names of the last update of all weights, as they came. part: of the last one of several weights alone."""

    def __init__(self) -> None:
        self.full: tuple[str, ...] = ()
        self.part: tuple[str, ...] = ()

    def committed(self, names: Sequence[str], *, alone: bool) -> None:
        """An update ended."""
        if not alone:
            self.full = tuple(names)
        elif len(names) > 1:
            self.part = tuple(names)

    def alone(self, names: Sequence[str]) -> int:
        """How many names came before the order of all weights began: all of them, where it did not."""
        begins = names.index(self.full[0]) if self.full and self.full[0] in names else len(names)
        rest = tuple(names[begins:])
        return begins if rest == self.full[: len(rest)] else len(names)

    def next(self, names: Sequence[str]) -> str | None:
        """The name that goes on with the order of all weights, where `names` end with the beginning of it."""
        count = len(names) - self.alone(names)
        return self.full[count] if 0 < count < len(self.full) else None

    def goes_on(self, names: Sequence[str]) -> bool:
        """Whether more is to come of an update like an earlier one."""
        return any(len(names) < len(one) and one[: len(names)] == tuple(names) for one in (self.full, self.part))
