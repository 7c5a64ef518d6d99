"""The digest of `digest.py` on a GPU, fused with the copy that it proves: each word is read once,
written once, and added up on the way.

One kernel launch works through a table of rows (`plan/rows.py`). A program takes some tiles of one
`Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from instep.digest import BLOCK_WORDS, MASK, Words, inner_weights, seed_of
from instep.plan.rows import Rows, contiguous
from instep.protocol import TensorMeta

TILE, SPAN, WARPS = 1024, 16, 4  # words, tiles and warps of a program: of 12 the fastest on an H200, to move and to read


def _exponents(size: int, mask: int, lowest: int) -> tuple[int, int, int]:
    """Returns three masks for all elements of a 64-bit word: the exponents, their lowest bits,
    and the bits that a carry out of them reaches."""
    lanes = sum(1 << (8 * size * lane) for lane in range(8 // size))
    return mask * lanes, lowest * lanes, (mask + lowest) * lanes


EXPONENTS = {
    "float64": _exponents(8, 0x7FF << 52, 1 << 52),
    "float32": _exponents(4, 0xFF << 23, 1 << 23),
    "bfloat16": _exponents(2, 0xFF << 7, 1 << 7),
    "float16": _exponents(2, 0x1F << 10, 1 << 10),
    "float8_e5m2": _exponents(1, 0x1F << 2, 1 << 2),
    "float8_e4m3fn": _exponents(1, 0x7F, 1),
}


class Run(NamedTuple):
    """What a table does with some rows of a tensor: it adds them to the sum of a slot, and where it
    copies, moves them to their targets.

    rows: in words of 8 bytes, addresses too. dtype: of the tensor's elements, by name.
    """

    rows: Rows
    slot: int
    seed: int
    dtype: str


def run_of(rows: Rows, meta: TensorMeta, slot: int) -> Run:
    return Run(rows, slot, seed_of(meta), meta.dtype)


def in_one(address: int, meta: TensorMeta, slot: int) -> Run:
    """Returns the run of a whole tensor, which lies contiguously at `address`."""
    return run_of(contiguous(meta.nbytes, address).in_padded_words(), meta, slot)


class Table:
    """A table of runs on a device. It can be launched again as long as the addresses stay the same.

    sums: room for two words of each slot, where others look for them too, or other tables add to
    them. The sums come first, then whether a slot has a number that is not finite.
    """

    def __init__(self, runs: Sequence[Run], slots: int, device: torch.device, *, copy: bool, sums: torch.Tensor | None = None) -> None:
        self.copy = copy
        programs = [-(-rows.numel // (TILE * SPAN)) for rows, _, _, _ in runs]
        starts = np.cumsum([0, *programs])
        columns = [
            (
                *(8 * rows.place, 8 * rows.target, rows.count, rows.length, rows.place_stride, rows.target_stride, rows.at, rows.stride),
                *(seed, slot, int(start)),
                *EXPONENTS.get(dtype, (0, 0, 0)),
            )
            for (rows, slot, seed, dtype), start in zip(runs, starts, strict=False)
        ]
        signed = np.array([[value & MASK for value in row] for row in columns], np.uint64).view(np.int64)
        self.programs = int(starts[-1])
        self.runs = torch.from_numpy(signed).to(device)
        self.of_program = torch.from_numpy(np.repeat(np.arange(len(runs), dtype=np.int32), programs)).to(device)
        self.weights = _weights(device)
        self.sums = torch.zeros(2 * slots, dtype=torch.int64, device=device) if sums is None else sums

    def launch(self, *, clear: bool = True) -> None:
        """Adds up every slot, and with `copy` moves the words too, on the current stream. clear:
        whether the sums begin at zero; otherwise they go on."""
        if clear:
            self.sums.zero_()
        if self.programs:
            from instep.kernels import move

            sums, flags = self.sums.chunk(2)
            with torch.cuda.device(self.runs.device):
                move[(self.programs,)](
                    *(self.runs, self.of_program, self.weights, sums, flags),
                    COPY=self.copy,
                    TILE=TILE,
                    SPAN=SPAN,
                    BLOCK=BLOCK_WORDS,
                    num_warps=WARPS,
                )

    def result(self) -> tuple[list[int], list[bool]]:
        """Waits for the GPU. Returns the sum of each slot, and whether the slot has a number
        that is not finite."""
        return results(self.sums)


def mark(device: torch.device) -> Callable[[], bool]:
    """Returns a function that tells whether the device has finished the work that is in the current
    stream now. On a CPU work is done when it returns."""
    if device.type != "cuda":
        return lambda: True
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    return done.query


def totals(sums: torch.Tensor) -> Words:
    """Waits for the GPU. Returns the sum of each slot. sums: as for `results`."""
    found: Words = sums.cpu().chunk(2)[0].numpy().view(np.uint64) if len(sums) else np.empty(0, np.uint64)
    return found


def results(sums: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Waits for the GPU. Returns what `Table.result` does. sums: of a table, or of several that
    share them. int64 [2 * slots]."""
    total, flags = sums.cpu().chunk(2) if len(sums) else (sums, sums)
    return total.numpy().view(np.uint64).tolist(), flags.ne(0).tolist()


def memory_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Waits for the GPU. Returns the sum of each tensor's bytes in C order with seed 0. All
    tensors are on one GPU."""
    if not tensors:
        return []
    words = [as_words(tensor) for tensor in tensors]
    runs = [Run(contiguous(len(one), one.data_ptr() // 8), slot, 0, "int64") for slot, one in enumerate(words)]
    table = Table(runs, len(runs), words[0].device, copy=False)
    table.launch()
    return table.result()[0]


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as 64-bit words, with zeros at the end: a view if alignment
    and size allow, else a copy. int64 [N]."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8 == 0 and len(flat) % 8 == 0:
        return flat.view(torch.int64)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)


@lru_cache(maxsize=16)
def warm_up(device: torch.device) -> None:
    """Compiles the kernels for a GPU, which takes seconds: call this before an engine is paused.
    Does nothing on the CPU.

    Triton compiles anew for addresses that are no multiples of 16: flags of an odd number of slots
    lie at one.
    """
    if device.type != "cuda":
        return
    words = torch.zeros(2, dtype=torch.int64, device=device)
    first = words.data_ptr() // 8
    run = Run(contiguous(1, first, target=first + 1), 0, 0, "bfloat16")
    for copy, slots in product((True, False), (1, 2)):
        Table([run], slots, device, copy=copy).launch()
    torch.cuda.synchronize(device)


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(inner_weights().view(np.int64)).to(device)
