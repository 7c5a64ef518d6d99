"""CUDA IPC without a GPU: memory of this process stands for that of a card, addresses for mapped ones, and numpy does what the kernel does.

What is proved with it is everything around the kernel: which addresses are read and written when, and which sums are told.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from instep.digest import BLOCK_WORDS, MASK, inner_weights, mix
from instep.digest_cuda import EXPONENTS, Run
from instep.receiver import pull, stream
from instep.transport import driver, ipc, tally

PAGE = 1 << 21
"""Of a pretended allocation: as in PyTorch's allocator, many tensors share one, and some move within it."""


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc.IpcTransport, "consider", lambda self, device, workers: None)
    monkeypatch.setattr(driver, "allocation", lambda address: (address // PAGE * PAGE, PAGE))
    monkeypatch.setattr(driver, "share", lambda base: base.to_bytes(driver.HANDLE_BYTES, "little"))
    monkeypatch.setattr(driver, "attach", lambda handle: int.from_bytes(handle, "little"))
    monkeypatch.setattr(driver, "detach", lambda address: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for module in (ipc, pull, stream, tally):
        monkeypatch.setattr(module, "Table", Table)
    for module in (stream, tally):
        monkeypatch.setattr(module, "added", added)
    monkeypatch.setattr(ipc, "OPENED", {})
    monkeypatch.setattr(ipc, "current_gpu", lambda: torch.device("cpu"))


class Table:
    """`digest_cuda.Table`, word by word. `made` counts tables and `moved` the runs that were copied."""

    made = 0
    moved: list[Run] = []  # noqa: RUF012

    def __init__(self, runs: Sequence[Run], slots: int, device: torch.device, *, copy: bool) -> None:
        Table.made += 1
        self.runs, self.slots, self.copy = runs, slots, copy

    def launch(self) -> None:
        self.sums, self.flags = [0] * self.slots, [False] * self.slots
        for run in self.runs:
            at = np.add.outer(np.arange(run.rows) * run.source_stride, np.arange(run.row_words)).reshape(-1)
            to = np.add.outer(np.arange(run.rows) * run.target_stride, np.arange(run.row_words)).reshape(-1)
            if not at.size:
                continue
            words = _memory(run.source, int(at.max()) + 1)[at]
            if self.copy:
                _memory(run.target, int(to.max()) + 1)[to] = words
                Table.moved.append(run)
            position = (at + run.position).astype(np.uint64)
            outer = mix(position // np.uint64(BLOCK_WORDS) + np.uint64(run.seed)) | np.uint64(1)
            folded = words + (words >> np.uint64(32))
            self.sums[run.slot] += int((folded * outer * inner_weights()[position % np.uint64(BLOCK_WORDS)]).sum())
            mask, lowest, carry = (np.uint64(value) for value in EXPONENTS.get(run.dtype, (0, 0, 0)))
            self.flags[run.slot] |= bool((((words & mask) + lowest) & carry).any())

    def result(self) -> tuple[list[int], list[bool]]:
        return [value & MASK for value in self.sums], self.flags


def added(tables: Iterable[Table]) -> tuple[list[int], list[bool]]:
    """`digest_cuda.added`."""
    results = [table.result() for table in tables]
    sums = [sum(parts) & MASK for parts in zip(*(sums for sums, _ in results), strict=True)]
    return sums, [any(flags) for flags in zip(*(flags for _, flags in results), strict=True)]


def _memory(address: int, words: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))
