"""A source that stands for one source after another: for callers that are handed new weights with
each update."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from instep.errors import SourceError
from instep.protocol import TensorMeta
from instep.source import Source, again, device_of, own


class CurrentSource:
    """Passes on what `source` gives now. Raises `SourceError` while `source` is None."""

    source: Source | None = None

    def metadata(self) -> list[TensorMeta]:
        return self._now().metadata()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._now().tensors()

    def again(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return again(self._now())

    @property
    def stays(self) -> bool:
        return bool(own(self._now(), "stays"))

    def stamp(self) -> Hashable:
        return id(self.source), self._now().stamp()

    def score(self, token_ids: list[int]) -> list[float] | None:
        return self._now().score(token_ids)

    @property
    def whole(self) -> bool:
        return bool(getattr(self._now(), "whole", False))

    @property
    def device(self) -> torch.device:
        return device_of(self._now())

    def _now(self) -> Source:
        if self.source is None:
            raise SourceError("there are no weights to send yet", next_step="register a model, or give the weights")
        return self.source
