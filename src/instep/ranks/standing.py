"""Checksums of what one rank gives of a version, taken before anything is read and after all of it.
So each rank knows by itself that nothing has changed.

Rank 0 asks all for the first checksums, and for the second ones when every rank is done with the
version. So between the two there is a moment in which all ranks had what was read.
"""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import SourceError
from instep.plan.shards import Piece
from instep.source.sharded import ShardedModule
from instep.source.tensors import checksums


class Standing:
    """Compares checksums of the live tensors of one rank."""

    def __init__(self, module: ShardedModule) -> None:
        self.module = module
        self.noted: dict[str, int] = {}

    def note(self, given: Iterable[Piece]) -> None:
        """Takes the first checksums, of the live tensors that these pieces belong to."""
        self.noted = self._sums(dict.fromkeys(piece.live for piece in given))

    def check(self) -> None:
        """Takes the second checksums. Raises `SourceError` naming the first tensor that differs."""
        noted, self.noted = self.noted, {}
        for name, now in self._sums(noted).items():
            if now != noted[name]:
                raise SourceError.changed(name)

    def _sums(self, names: Iterable[str]) -> dict[str, int]:
        return dict(zip(names, checksums([self.module.memory(name) for name in names]), strict=True))
