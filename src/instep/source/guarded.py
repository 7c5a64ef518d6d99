"""Names the source in errors: an exception of a source's own code becomes a `SourceError`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from instep.errors import ConfigError, InstepError, SourceError
from instep.protocol import TensorMeta
from instep.source import Look, Source, again, device_of, own
from instep.source.pairs import PairSource
from instep.source.within import Within

T = TypeVar("T")


class Guarded:
    """Passes on a source's answers. An exception that is no `InstepError` becomes the cause of a
    `SourceError`."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def metadata(self) -> list[TensorMeta]:
        return self._ask("metadata", lambda: self.source.metadata())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._calling("tensors"):
            yield from self.source.tensors()

    def again(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        with self._calling("tensors"):
            yield from again(self.source)

    @contextmanager
    def fed(self, pairs: Iterator[tuple[str, torch.Tensor]] | None) -> Iterator[None]:
        """Gives a `PairSource` the pairs of one push. Raises `ConfigError` where pairs come without
        such a source, and where such a source gets none."""
        takes = isinstance(self.source, PairSource)
        if takes != (pairs is not None):
            if takes:
                raise ConfigError("a PairSource has no tensors of its own", next_step="write sync.push(version, pairs=iterator)")
            raise ConfigError(
                f"pairs are for a PairSource, and this source is a {type(self.source).__name__}",
                next_step="make WeightSync(PairSource(), engines), or push without pairs",
            )
        if not isinstance(self.source, PairSource) or pairs is None:
            yield
            return
        with self.source.fed(self._guarded(pairs)):
            yield

    def _guarded(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        with self._calling("pairs"):
            yield from pairs

    @property
    def once(self) -> bool:
        """Tells whether the values of this push can be read only once; False for a source that does
        not say."""
        return self._ask("once", lambda: bool(own(self.source, "once")))

    @property
    def stays(self) -> bool:
        return self._ask("stays", lambda: bool(own(self.source, "stays")))

    def within(self) -> Iterator[list[Within]]:
        """Yields what else of the source could be pushed; nothing if the source has no `within`."""
        with self._calling("within"):
            read = own(self.source, "within")
            yield from read() if read else ()

    def stamp(self) -> Hashable:
        return self._ask("stamp", lambda: self.source.stamp())

    def look(self) -> Look:
        look: Callable[[], Look] | None = self._ask("look", lambda: own(self.source, "look"))
        return self._ask("look", look) if look else Look(self.metadata(), self.stamp())

    def score(self, token_ids: list[int]) -> list[float] | None:
        return self._ask("score", lambda: self.source.score(token_ids))

    @property
    def merged(self) -> bool:
        """Tells whether the values have an adapter merged into them; False for a source that does
        not say."""
        return self._ask("merged", lambda: bool(getattr(self.source, "merged", False)))

    @property
    def whole(self) -> bool:
        """Tells whether the tensors are all that a checkpoint of the model has; False for a source
        that does not say."""
        return self._ask("whole", lambda: bool(getattr(self.source, "whole", False)))

    @property
    def device(self) -> torch.device:
        return self._ask("tensors", lambda: device_of(self.source))

    def _ask(self, method: str, call: Callable[[], T]) -> T:
        with self._calling(method):
            return call()

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        try:
            yield
        except InstepError:
            raise
        except Exception as error:
            raise SourceError(f"{type(self.source).__name__}.{method} raised {type(error).__name__}: {error}") from error
