"""Rank 0: the source of a push whose tensors lie in all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from instep.errors import SourceError
from instep.plan.shards import share_out
from instep.protocol import TensorMeta, decode
from instep.ranks.channel import Channel
from instep.ranks.gather import ByteRange, Meeting, lists, take_all
from instep.ranks.run import Run
from instep.ranks.standing import Standing
from instep.source.sharded import Description, ShardedModule, Told
from instep.source.within import Within
from instep.transport import at_rest


class RankedSource:
    """A `Source` whose every method but `stamp` and `score` asks the other ranks.

    It gives whole tensors, gathered one by one. Transports that can do better use `run` and `fill`.
    """

    whole = True  # see `source.guarded.Guarded.whole`

    def __init__(self, module: ShardedModule, channel: Channel) -> None:
        self.module, self.channel = module, channel
        self.meeting, self.standing = Meeting(channel), Standing(module)
        self.descriptions: list[Description] = []
        self.runs: dict[bool, Run] = {}
        self._made: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[TensorMeta]:
        """Describes the tensors of all ranks. Raises `SourceError` where ranks have different
        tensors, or together do not hold every element exactly once."""
        self._made = {}
        self.channel.tell("describe")
        own = self.module.describe()
        at_rest(self.device)
        answers = [decode(answer, Told).description for answer in self.channel.collect()]
        now = [own, *(new or self.descriptions[rank] for rank, new in enumerate(answers, 1))]
        if now != self.descriptions:
            self._agree(now)
            self.descriptions = now
        return own.tensors

    def _agree(self, descriptions: list[Description]) -> None:
        own = descriptions[0]
        for rank, one in enumerate(descriptions):
            for mine, theirs in ((own.tensors, one.tensors), (own.parts, one.parts)):
                if mine != theirs:
                    different = sorted({meta.name for meta in set(mine) ^ set(theirs)}) or ["their order"]
                    raise SourceError(f"ranks 0 and {rank} of the trainer describe their tensors differently: {', '.join(different[:4])}")
        moved = [meta for meta in own.tensors if meta.name not in own.made]
        given = share_out(moved, [one.pieces for one in descriptions])
        parts = share_out(own.parts, [one.part_pieces for one in descriptions])
        self.runs = {False: Run(own.tensors, dict(enumerate(given))), True: Run(own.parts, dict(enumerate(parts)))}
        names = [[sorted({piece.tensor for piece in some}) for some in both] for both in zip(given, parts, strict=True)]
        self.channel.ask("share", names)

    def note(self) -> None:
        """Has every rank take the first checksums of what it gives."""
        self.channel.tell("note")
        self.standing.note([*self.runs[False].given[0], *self.runs[True].given[0]])
        self.channel.collect()

    def check(self) -> None:
        """Has every rank take the second checksums, when no rank reads any more. Raises
        `SourceError` where a rank finds a difference."""
        self.channel.tell("check")
        self.standing.check()
        self.channel.collect()

    def run(self, tensors: list[TensorMeta]) -> Run:
        """Returns the tensors in the dtypes to send, each from the ranks that give it."""
        return Run(tensors, self.runs[False].given)

    def value(self, name: str) -> torch.Tensor:
        """Returns a made tensor. Its group is held until a tensor of another group is asked for."""
        if name not in self._made:
            self._made = {}
            self._made = self.module.make(name, self._gathered)
        return self._made[name]

    def _gathered(self, names: list[str]) -> dict[str, torch.Tensor]:
        run, found = self.runs[True], {}
        wanted = list(run.stretches(names))
        stretches = [ByteRange(True, low, high) for low, high, _ in wanted]
        taken = take_all(self.meeting, run, self.module.memory, self.device, stretches, self._rooms(stretches))
        for (low, _, together), room in zip(wanted, taken, strict=True):
            for meta in together:
                at = run.offsets[meta.name] - low
                found[meta.name] = room[at : at + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)
        return found

    def _rooms(self, stretches: Sequence[ByteRange]) -> Iterator[torch.Tensor]:
        """Yields a new buffer for each stretch, when it is needed."""
        return (torch.empty(stretch.high - stretch.low, dtype=torch.uint8, device=self.device) for stretch in stretches)

    def fill(self, run: Run, device: torch.device, stretches: Sequence[ByteRange], rooms: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Gathers stretches of `run`, one after the other, each in the next of `rooms`, which are
        on `device`. Each is complete for work that the current stream gets next.

        Ranks are asked for as many stretches at once as possible. A list ends with a stretch that
        holds a made tensor, because making it asks the ranks for their parts.
        """
        for together in lists(stretches, lambda stretch: any(self._made_within(run, stretch.low, stretch.high))):
            taken = take_all(self.meeting, run, self.module.memory, device, together, rooms)
            for stretch, room in zip(together, taken, strict=True):
                self.fill_made(run, room, stretch.low, stretch.high)
                run.clear_gaps(room, stretch.low, stretch.high)
                yield room

    def fill_made(self, run: Run, room: torch.Tensor, low: int, high: int) -> None:
        """Fills in the bytes from `low` to `high` that no rank gives, because rank 0 computes
        them."""
        for name, first, last in self._made_within(run, low, high):
            data = self.value(name).to(getattr(torch, run.metas[name].dtype)).contiguous().reshape(-1).view(torch.uint8)
            at = run.offsets[name]
            room[first - low : last - low].copy_(data[first - at : last - at])

    def _made_within(self, run: Run, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        """Yields the made tensors, and which bytes of the run each has between `low` and `high`."""
        for name in self.descriptions[0].made:
            at = run.offsets[name]
            first, last = max(at, low), min(at + run.metas[name].nbytes, high)
            if first < last:
                yield name, first, last

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors, gathered one by one, for transports that cannot use `run` and
        `fill`."""
        run = self.run(self.descriptions[0].tensors)
        self.note()
        self.channel.ask("send", run.tensors)
        stretches = [ByteRange(False, run.offsets[name], run.offsets[name] + meta.nbytes) for name, meta in run.metas.items()]
        for (name, meta), room in zip(run.metas.items(), self.fill(run, self.device, stretches, self._rooms(stretches)), strict=True):
            yield name, room.view(getattr(torch, meta.dtype)).view(meta.shape)

    def again(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Checks that no rank's tensors have changed. Nothing is gathered a second time."""
        self.check()
        yield from ((name, None) for name in self.runs[False].metas)

    def within(self) -> Iterator[list[Within]]:
        return self.module.within()

    def stamp(self) -> Hashable:
        return self.module.stamp()

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    @property
    def merged(self) -> bool:
        return self.module.merged

    @property
    def made(self) -> frozenset[str]:
        """The names of tensors that no rank has: `value` computes them."""
        return frozenset(self.descriptions[0].made)

    @property
    def elsewhere(self) -> str | None:
        """The reason against transports that stay on one host, or None."""
        return "a rank of the trainer is on another host" if self.channel.spread else None

    @property
    def device(self) -> torch.device:
        return self.module.device
