"""Tensors of a version that passes by in buckets, put together for the engine's own loader.

In the first commit, when no layer is written directly yet, that is the whole model. The loader asks
for tensors in the order in which they come. So a bucket is received when something in it is asked
for, and a tensor is let go when it was handed over. Tensors stay on the GPU while there is room: a
copy to host memory and back takes many times as long as all else. In later commits few tensors or
none are left, and they are kept in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import torch

from instep.plan.rows import Rows
from instep.protocol import TensorMeta

Passed = list[tuple[TensorMeta, Rows, torch.Tensor]]
"""What a bucket has of tensors (`plan.buckets.pieces`), with the bytes, which are valid until the
next bucket."""


class StreamedStateDict(Mapping[str, torch.Tensor]):
    """The tensors `names`. An alias gives the tensor that it stands for.

    kept: tensors that may be asked for again. Each other one is let go when it is handed over.
    """

    def __init__(
        self, metas: Mapping[str, TensorMeta], names: Set[str], kept: Set[str], passing: Iterator[Passed], device: torch.device
    ) -> None:
        self.metas, self.names, self.kept = metas, names, kept
        self.passing, self.ended = passing, False
        self.device = device if names - kept else torch.device("cpu")
        self.largest = max((metas[name].nbytes for name in names), default=0)
        self.left = {name: metas[name].nbytes for name in names}
        self.rooms = {name: torch.empty(0, dtype=torch.uint8) for name, nbytes in self.left.items() if not nbytes}

    def __getitem__(self, name: str) -> torch.Tensor:
        meta = self.metas[name]
        original = meta.alias_of or name
        while self.left[original] and self.take():
            pass
        room = self.rooms[original] if original in self.kept else self.rooms.pop(original)
        return room.view(getattr(torch, meta.dtype)).view(meta.shape)

    def __iter__(self) -> Iterator[str]:
        return (name for name, meta in self.metas.items() if (meta.alias_of or name) in self.names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def take_all(self) -> None:
        """Receives the remaining buckets. From now on only tensors in `kept` will be asked for."""
        self.ended, self.names = True, self.kept
        self.rooms = {name: room for name, room in self.rooms.items() if name in self.kept}
        while self.take():
            pass

    def take(self) -> bool:
        """Receives the next bucket. Returns False if there is none."""
        parts = next(self.passing, None)
        wanted = [(meta, rows, data) for meta, rows, data in parts or () if meta.name in self.names]
        self._make_room([meta for meta, rows, _ in wanted if rows.at == 0])
        for meta, rows, data in wanted:
            self.rooms[meta.name][rows.at : rows.at + rows.length].copy_(data)
            self.left[meta.name] -= rows.length
        return parts is not None

    def _make_room(self, metas: list[TensorMeta]) -> None:
        """Allocates tensors on the GPU while the engine's loader has room beside them, else in host
        memory. The loader holds a layer twice: as it comes and as it becomes."""
        room = free(self.device) - 2 * self.largest if metas else 0
        for meta in metas:
            fits = meta.nbytes <= room
            self.rooms[meta.name] = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.device if fits else "cpu")
            room -= meta.nbytes if fits else 0


def free(device: torch.device) -> int:
    """Returns the bytes of a GPU that this process could allocate, PyTorch's cache included; 0 for
    another device."""
    if device.type != "cuda":
        return 0
    held = torch.cuda.memory_stats(device)
    cached: int = held["reserved_bytes.all.current"] - held["allocated_bytes.all.current"]
    return torch.cuda.mem_get_info(device)[0] + cached
