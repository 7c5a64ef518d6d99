"""(name, tensor) pairs as a source: a framework gives them once for each push, one at a time."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from instep.errors import SourceError
from instep.protocol import TensorMeta, dtype_name
from instep.source.module import MappingSource
from instep.source.tensors import check, checksums
from instep.source.within import Within

Pair = tuple[str, torch.Tensor]
AFRESH = "engines keep what they serve: push again, the next round is read whole before anything is sent"


class PairSource:
    """Pairs that each push is given anew, as `sync.push(version, pairs=iterator)`.

        sync = WeightSync(PairSource(), engines)
        sync.push("step-1", pairs=gathered(model))  # reads the iterator once

    stable: whether each tensor keeps its memory and values until the push returns. Without it, a
    tensor is copied before the iterator is asked for the next one, and may be reused afterwards.

    Without `stable`, the first round is held in memory to learn its names, dtypes and shapes: one
    copy of the weights, freed when the push returns. Later rounds are streamed and nothing is held.
    Tensors on a GPU are copied into buffers there in every round, because workers read them after
    the iterator has gone on.

    Matrices that have the same bytes when they are held count as tied, as a head and its embedding.
    The rounds have the same names, dtypes and shapes in one order. A push raises `SourceError`
    where a streamed round differs from the one before. The next round is held, and may be another
    list.
    """

    def __init__(self, *, stable: bool = False) -> None:
        self._stable = stable
        self._round = 0
        self._known: dict[str, TensorMeta] = {}  # what a streamed round must give, by the framework's names
        self._buffers: dict[str, torch.Tensor] = {}  # on a GPU, written to in each round
        self._held: MappingSource | None = None
        self._streamed: Iterator[Pair] | None = None
        self.device = torch.device("cpu")

    @contextmanager
    def fed(self, pairs: Iterator[Pair]) -> Iterator[None]:
        """Gives the source the pairs of one push. Reads them here unless they can be streamed.

        Raises `SourceError` for what is no pair of a name and a tensor, and for a name that comes
        twice.
        """
        self._round += 1
        try:
            if self._known:
                self._streamed = pairs
            else:
                self._hold(pairs)
            yield
        except BaseException:
            self._known = {}  # a failed push may need the values twice, from one transport to the next
            raise
        finally:
            self._round += 1
            self._held = self._streamed = None

    def _hold(self, pairs: Iterator[Pair]) -> None:
        given: dict[str, torch.Tensor] = {}
        for name, tensor in _checked(pairs):
            if name in given:
                raise SourceError(f"the pairs gave {name} twice", tensor=name)
            given[name] = tensor if self._stable else self._copied(name, tensor)
        if not given:
            raise SourceError("the pairs are empty", next_step="engines keep what they serve: push an iterator that gives tensors")
        on = {tensor.device for tensor in given.values()}
        self.device = next(iter(given.values())).device
        self._buffers = {name: tensor for name, tensor in given.items() if tensor.is_cuda and not self._stable}
        _tie(given)
        self._held = MappingSource(given)
        if not self._stable and on == {torch.device("cpu")}:
            self._known = dict(zip(given, self._held.metadata(), strict=True))

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (tensor.shape, tensor.dtype, tensor.device):
            return tensor.clone(memory_format=torch.contiguous_format)
        return buffer.copy_(tensor)

    def metadata(self) -> list[TensorMeta]:
        return self._held.metadata() if self._held else list(self._known.values())

    def tensors(self) -> Iterator[Pair]:
        """Yields the pairs under the names of a checkpoint. A streamed round can be read once.

        Raises `SourceError` outside a push, for a second read of a streamed round, and where a
        streamed round differs from the one before.
        """
        if self._held is not None:
            yield from self._held.tensors()
            return
        pairs, self._streamed = self._streamed, None
        if pairs is None:
            raise SourceError("the pairs of this push were read already, and a second read is needed", next_step=AFRESH)
        given, sums = _checked(pairs), dict[str, int]()
        tied = {meta.alias_of for meta in self._known.values()}
        for known, meta in self._known.items():
            name, tensor = next(given, ("nothing", None))
            if name != known or tensor is None:
                raise self._differs(known, f"{name} came where {known} was")
            if (now := _kind(tensor)) != (was := f"{meta.dtype} {list(meta.shape)}"):
                raise self._differs(known, f"{known} is {now} now, and was {was}")
            if meta.name in tied:
                (sums[meta.name],) = checksums([tensor])
            if meta.alias_of is None:
                yield meta.name, tensor
            elif checksums([tensor]) != [sums[meta.alias_of]]:
                raise self._differs(known, f"{known} is not {meta.alias_of} any more, whose bytes it had")
        for name, _ in given:
            raise self._differs(name, f"{name} came after the last one")

    def _differs(self, name: str, how: str) -> SourceError:
        return SourceError(f"the pairs differ from those of the push before: {how}", tensor=name, next_step=AFRESH)

    def again(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields held pairs a second time. A streamed value has no second read: what was copied
        before the iterator went on is the version."""
        if self._held is not None:
            yield from self._held.again()
        else:
            yield from ((meta.name, None) for meta in self._known.values())

    @property
    def stays(self) -> bool:
        return self._held is not None

    @property
    def once(self) -> bool:
        """Whether the values of this push can be read only once."""
        return self._held is None

    def stamp(self) -> Hashable:
        return self._round, self._held.stamp() if self._held else None

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    def within(self) -> Iterator[list[Within]]:
        yield from self._held.within() if self._held else ()


def _tie(given: dict[str, torch.Tensor]) -> None:
    """Makes matrices of the same bytes one tensor. A tied head comes as a copy of its embedding,
    and the pairs do not say that the two are tied. Vectors are left alone: norms start as ones."""
    matrices = {name: tensor for name, tensor in given.items() if tensor.ndim > 1}
    firsts = zip(matrices, checksums([tensor[0].contiguous() for tensor in matrices.values()]), strict=True)
    seen: dict[Hashable, list[str]] = defaultdict(list)
    for name, first in firsts:  # few have the same first row
        tensor = given[name]
        alike = seen[tensor.shape, tensor.dtype, tensor.device, first]
        twin = next((other for other in alike if len({*checksums([given[other], tensor])}) == 1), None)
        if twin is None:
            alike.append(name)
        else:
            given[name] = given[twin]


def _kind(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _checked(pairs: Iterator[Any]) -> Iterator[Pair]:
    """Yields the pairs with detached tensors. Raises `SourceError` for what is no pair of a name
    and a tensor, and for a tensor that cannot travel."""
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise SourceError(f"the pairs gave {type(pair).__name__}, not (name, tensor)", next_step="push an iterator over (name, tensor)")
        check(*pair)
        yield pair[0], pair[1].detach()


@contextmanager
def drained(pairs: Iterable[Pair] | None) -> Iterator[Iterator[Pair] | None]:
    """Yields an iterator over the pairs, and reads what the block leaves of it.

    Other ranks of the trainer gather each tensor together with this one. They would wait for ever
    if this rank stopped half-way.
    """
    if pairs is None:
        yield None
        return
    left = iter(pairs.items() if isinstance(pairs, Mapping) else pairs)
    try:
        yield left
    except (Exception, asyncio.CancelledError):
        with suppress(Exception):  # the first error is raised below
            deque(left, maxlen=0)
        raise
    deque(left, maxlen=0)
