"""CUDA IPC without a GPU: memory of processes stands for that of cards, addresses for mapped ones, and numpy does what the kernel does.

What is proved with it is everything around the kernel: which addresses are read and written when, and which sums are told. A handle names
a process and an address in it; what lies in another process is read through the kernel, as the copy of a card would read it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from instep import digest_cuda
from instep.digest import BLOCK_WORDS, inner_weights, mix
from instep.digest_cuda import EXPONENTS, Run
from instep.receiver import cuda_compare, pull, stream
from instep.transport import bucket_digests, group
from instep.transport.broadcast import publish as broadcast
from instep.transport.ipc import driver
from instep.transport.ipc import export as ipc_export
from instep.transport.ipc import publish as ipc
from instep.transport.ipc import read as ipc_reader

PAGE = 1 << 21
"""Of a pretended allocation: as in PyTorch's allocator, many tensors share one, and some move within it."""
OWN = 1 << 47
"""Addresses of a process are below. Above, the process that an address belongs to is part of it."""
LIBC = ctypes.CDLL(None, use_errno=True)
SET_TRACER, ANYBODY = 0x59616D61, -1


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    LIBC.prctl(SET_TRACER, ctypes.c_ulong(ANYBODY), 0, 0, 0)  # where processes may otherwise not read each other
    monkeypatch.setattr(ipc.IpcTransport, "why_not", lambda self, device, workers: None)
    monkeypatch.setattr(driver, "allocation", lambda address: (address // PAGE * PAGE, PAGE))
    monkeypatch.setattr(driver, "share", lambda base: b"%d %d" % (os.getpid(), base))
    monkeypatch.setattr(driver, "attach", attach)
    monkeypatch.setattr(driver, "detach", lambda address: None)
    monkeypatch.setattr(driver, "read", lambda address, nbytes: _words(address, nbytes // 8).tobytes())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for module in (ipc_export, ipc_reader, pull, stream, bucket_digests, cuda_compare):
        monkeypatch.setattr(module, "Table", Table)
    monkeypatch.setattr(ipc_reader, "OPENED", {})
    monkeypatch.setattr(ipc_reader, "WARM", set())
    monkeypatch.setattr(ipc_reader, "current_gpu", lambda: torch.device("cpu"))


def pretend_nccl(monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    """Gloo carries what NCCL would, in buckets of so many bytes."""
    pretend(monkeypatch)
    monkeypatch.setitem(group.BACKENDS, "nccl", group.BACKENDS["gloo"])
    monkeypatch.setitem(broadcast.SETTINGS, "nccl", broadcast.Settings(bucket, "commit", on_gpu=True))
    consider = broadcast.BroadcastTransport.why_not

    def anything(self: broadcast.BroadcastTransport, device: torch.device, workers: Any) -> None:
        consider(self, device, workers)

    monkeypatch.setattr(broadcast.BroadcastTransport, "why_not", anything)


def attach(handle: bytes) -> int:
    process, base = map(int, handle.split())
    return base if process == os.getpid() else process * OWN + base


class Table:
    """`digest_cuda.Table`, word by word. `made` counts tables and `moved` the runs that were copied."""

    made = 0
    moved: list[Run] = []  # noqa: RUF012

    def __init__(self, runs: Sequence[Run], slots: int, device: torch.device, *, copy: bool, sums: torch.Tensor | None = None) -> None:
        Table.made += 1
        self.runs, self.copy = runs, copy
        self.sums = torch.zeros(2 * slots, dtype=torch.int64) if sums is None else sums

    def launch(self, *, clear: bool = True) -> None:
        if clear:
            self.sums.zero_()
        sums, flags = (part.numpy().view(np.uint64) for part in self.sums.chunk(2))
        for run in self.runs:
            rows = run.rows
            at, to, position = (
                np.add.outer(np.arange(rows.count) * stride, np.arange(rows.length)).reshape(-1)
                for stride in (rows.place_stride, rows.target_stride, rows.stride)
            )
            if not at.size:
                continue
            words = _words(8 * rows.place, int(at.max()) + 1)[at]
            if self.copy:
                _memory(8 * rows.target, int(to.max()) + 1)[to] = words
                Table.moved.append(run)
            position = (position + rows.at).astype(np.uint64)
            outer = mix(position // np.uint64(BLOCK_WORDS) + np.uint64(run.seed)) | np.uint64(1)
            folded = words + (words >> np.uint64(32))
            sums[run.slot : run.slot + 1] += (folded * outer * inner_weights()[position % np.uint64(BLOCK_WORDS)]).sum()
            mask, lowest, carry = (np.uint64(value) for value in EXPONENTS.get(run.dtype, (0, 0, 0)))
            flags[run.slot] |= np.uint64((((words & mask) + lowest) & carry).any())

    def result(self) -> tuple[list[int], list[bool]]:
        return digest_cuda.results(self.sums)


def _memory(address: int, words: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))


class _Stretch(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def _words(address: int, words: int) -> Any:
    """Words of this process or of another one."""
    process, there = divmod(address, OWN)
    if not process:
        return _memory(address, words)
    found = np.empty(words, np.uint64)
    here, far = _Stretch(found.ctypes.data, found.nbytes), _Stretch(there, found.nbytes)
    read = LIBC.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(far), 1, 0)
    assert read == found.nbytes, os.strerror(ctypes.get_errno())
    return found
