"""Sums of the memory of tensors: on any device, every byte, each stretch once."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable

import numpy as np
import torch
import xxhash

from instep.digest_cuda import Run, Table
from instep.plan.rows import contiguous

Extent = tuple[torch.device, int, int]
"""A device, the address of the first byte, and the address after the last byte."""


def extent(tensor: torch.Tensor) -> Extent | None:
    """Returns where a strided tensor lies, gaps between its elements included. None where it has no
    memory."""
    if tensor.numel() == 0 or not (start := tensor.data_ptr()):
        return None
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, start, start + elements * tensor.element_size()


class Memory:
    """Collects the memory of tensors and sums it up. spared: tensors whose memory is left out. The
    gaps between their elements are not left out."""

    def __init__(self, spared: Iterable[torch.Tensor]) -> None:
        self._slots: dict[Extent, int] = {}
        self._bytes: list[torch.Tensor] = []
        self._with_gaps: set[Hashable] = set()
        stretches: dict[torch.device, list[tuple[int, int]]] = defaultdict(list)
        for tensor in spared:
            if (found := extent(tensor)) is not None:
                device, start, stop = found
                if stop - start > tensor.numel() * tensor.element_size():
                    self._with_gaps.add(_elements(tensor))
                else:
                    stretches[device].append((start, stop))
        self._spared = {device: _joined(some) for device, some in stretches.items()}

    def is_spared(self, tensor: torch.Tensor, found: Extent) -> bool:
        device, start, stop = found
        stretches = self._spared.get(device, [])
        at = bisect_right(stretches, start, key=lambda stretch: stretch[0]) - 1
        return (at >= 0 and stop <= stretches[at][1]) or (bool(self._with_gaps) and _elements(tensor) in self._with_gaps)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor lies in memory that is left out."""
        found = extent(tensor)
        return found is not None and self.is_spared(tensor, found)

    def slot(self, tensor: torch.Tensor, found: Extent) -> int:
        """Adds a tensor's memory. Returns its index in the result of `sums`."""
        if found not in self._slots:
            self._slots[found] = len(self._slots)
            storage = tensor.untyped_storage()
            offset = tensor.storage_offset() * tensor.element_size()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._bytes.append(flat.set_(storage, offset, (found[2] - found[1],), (1,)))
        return self._slots[found]

    def sums(self) -> list[int]:
        """Waits for the sums and returns them; they are equal for equal bytes. References to the
        tensors are dropped."""
        found, self._bytes = self._bytes, []
        of_device: dict[torch.device, list[int]] = defaultdict(list)
        for slot, flat in enumerate(found):
            of_device[flat.device].append(slot)
        sums = [0] * len(found)
        for device, slots in of_device.items():
            some = [found[slot] for slot in slots]
            for slot, total in zip(slots, _on_gpu(some, device) if device.type == "cuda" else map(_hash, some), strict=True):
                sums[slot] = total
        return sums


def _elements(tensor: torch.Tensor) -> Hashable:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns stretches in order, with those that touch merged into one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _hash(flat: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat.cpu().numpy().data)


def _on_gpu(found: list[torch.Tensor], device: torch.device) -> list[int]:
    """Sums up memory of one GPU: one launch for all words of 8 bytes, and one transfer for the
    bytes before and after them."""
    runs, rest = [], []
    for slot, flat in enumerate(found):
        start, size = flat.data_ptr(), flat.numel()
        first = min(-start % 8, size)
        words = (size - first) // 8
        if words:
            runs.append(Run(contiguous(words, (start + first) // 8), slot, 0, "uint8"))
        rest += [(slot, part) for part in (flat[:first], flat[first + 8 * words :]) if len(part)]
    table = Table(runs, len(found), device, copy=False)
    table.launch()
    sums, _ = table.result()
    odd = torch.cat([part for _, part in rest]).cpu().numpy() if rest else np.empty(0, np.uint8)
    ends = np.cumsum([0, *(len(part) for _, part in rest)])
    for (slot, _), low, high in zip(rest, ends, ends[1:], strict=False):
        sums[slot] = xxhash.xxh3_64_intdigest(odd[low:high].tobytes(), seed=sums[slot])
    return sums
