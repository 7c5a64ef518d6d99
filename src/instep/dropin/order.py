"""The order in which a trainer's tensors come tells what they are, where the trainer does not say
it. Pure functions of names.

A trainer sends its weights in one order, again and again. So tensors that come while that order has
not begun are some weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Order:
    """full: the names of the last update of all weights, as they came. part: of the last one of
    several weights alone."""

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
        """How many names came before the order of all weights began: all of them, where it did not.

        None of them, where it began and something else came then: that is an update of all weights
        with a gap.
        """
        if not self.full or self.full[0] not in names:
            return len(names)
        begins = names.index(self.full[0])
        rest = tuple(names[begins:])
        return begins if rest == self.full[: len(rest)] else 0

    def next(self, names: Sequence[str]) -> str | None:
        """The name that goes on with the order of all weights, where some names came before it
        began."""
        before = self.alone(names)
        count = len(names) - before
        return self.full[count] if before and 0 < count < len(self.full) else None

    def goes_on(self, names: Sequence[str]) -> bool:
        """Whether more is to come of an update like an earlier one."""
        return any(len(names) < len(one) and one[: len(names)] == tuple(names) for one in (self.full, self.part))


def before_the_first(names: Sequence[str], places: Mapping[str, int]) -> int:
    """How many names came before the one that the engine holds first, where they are so few that
    they may be weights alone.

    An update of all weights mostly begins with that one. So before any order is known, names in
    front of it are of doubtful origin: they may be of this update, or have come alone. places:
    where the engine holds what it reads of each name.
    """
    known = [name for name in names if name in places]
    if not known:
        return 0
    before = names.index(min(known, key=places.__getitem__))
    few = before == 1 or 10 * before <= len(names)
    return before if few and list(names) != sorted(names) else 0
