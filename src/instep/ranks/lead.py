"""Rank 0: the source of a push whose tensors lie in all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from instep.errors import SourceError
from instep.plan.shards import share_out
from instep.protocol import TensorMeta, decode
from instep.ranks.channel import Channel
from instep.ranks.gather import Meeting, Stretch, take
from instep.ranks.run import Run
from instep.source.sharded import Description, ShardedModule, Told


class RankedSource:
    """A `Source` whose every method but `stamp` and `score` asks the other ranks.

    Beside whole tensors, gathered one by one, it has what transports need that do better: `run` and `fill`.
    """

    def __init__(self, module: ShardedModule, channel: Channel) -> None:
        self.module, self.channel = module, channel
        self.meeting = Meeting(channel)
        self.descriptions: list[Description] = []
        self.runs: dict[bool, Run] = {}
        self._made: dict[str, torch.Tensor] = {}

    def metadata(self) -> list[TensorMeta]:
        """Raises `SourceError` where the ranks do not have the same tensors, or together not all of them once."""
        self._made = {}
        self.channel.tell("describe")
        own = self.module.describe()
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

    def run(self, tensors: list[TensorMeta]) -> Run:
        """The tensors in the dtypes to send, each from the ranks that give it."""
        return Run(tensors, self.runs[False].given)

    def value(self, name: str) -> torch.Tensor:
        """A made tensor. The group that it belongs to is held until one of another group is asked for."""
        if name not in self._made:
            self._made = {}
            self._made = self.module.make(name, self._gathered)
        return self._made[name]

    def _gathered(self, names: list[str]) -> dict[str, torch.Tensor]:
        run, found = self.runs[True], {}
        for low, high, together in run.stretches(names):
            room = torch.empty(high - low, dtype=torch.uint8, device=self.device)
            take(self.meeting, run, self.module.memory, room, Stretch(True, low, high))
            for meta in together:
                at = run.offsets[meta.name] - low
                found[meta.name] = room[at : at + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)
        return found

    def fill(self, run: Run, room: torch.Tensor, stretch: Stretch) -> None:
        """Brings a stretch of `run` into `room`. Complete when it returns."""
        take(self.meeting, run, self.module.memory, room, stretch)
        self.fill_made(run, room, stretch.low, stretch.high)
        run.clear_gaps(room, stretch.low, stretch.high)

    def fill_made(self, run: Run, room: torch.Tensor, low: int, high: int) -> None:
        """What no rank gives of bytes `low` to `high`, because it is made here."""
        for name in self.descriptions[0].made:
            meta, at = run.metas[name], run.offsets[name]
            first, last = max(at, low), min(at + meta.nbytes, high)
            if first < last:
                data = self.value(name).to(getattr(torch, meta.dtype)).contiguous().reshape(-1).view(torch.uint8)
                room[first - low : last - low].copy_(data[first - at : last - at])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, gathered one by one: for transports that know no better."""
        run = self.run(self.descriptions[0].tensors)
        self.channel.ask("send", run.tensors)
        for name, meta in run.metas.items():
            room = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.device)
            self.fill(run, room, Stretch(False, run.offsets[name], run.offsets[name] + meta.nbytes))
            yield name, room.view(getattr(torch, meta.dtype)).view(meta.shape)

    def stamp(self) -> Hashable:
        return self.module.stamp()

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    @property
    def made(self) -> frozenset[str]:
        """Tensors that no rank has: `value` makes them."""
        return frozenset(self.descriptions[0].made)

    @property
    def device(self) -> torch.device:
        return self.module.device
