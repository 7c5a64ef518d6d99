"""The digest of a tensor: 64 bits, keyed by position, additive over disjoint parts.

    seed      = xxh3_64("name|dtype|shape")
    x[k]      = k-th little-endian 64-bit word of the tensor's contiguous bytes, zero-padded at the end
    w[k]      = U[k // 4096] * T[k % 4096]      T[j] = mix(j) | 1,  U[b] = mix(seed + b) | 1
    digest    = seed + sum over k of  w[k] * (x[k] + (x[k] >> 32))                            (all modulo 2^64)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014); the sum is the multilinear hash of Carter and Wegman. The added `x >> 32`
keeps a difference in a word's upper half from reaching the upper bits of the product alone. Because
the sum is linear in every element, parts of a tensor held by different processes, zero elsewhere,
add up to the digest of the whole: shards are compared without gathering them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash

from instep.protocol import ITEM_BYTES, TensorMeta

BLOCK_WORDS = 4096
BLOCK_BYTES = 8 * BLOCK_WORDS
STRIP_BLOCKS = 16  # 512 KiB: a strip and its scratch stay in a core's second-level cache
MASK = (1 << 64) - 1

CHUNK = 128 * BLOCK_BYTES  # 4 MiB: one job of a thread

Item = TypeVar("Item")
Result = TypeVar("Result")
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def mix(z: Words) -> Words:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.lru_cache(maxsize=1)
def inner_weights() -> Words:
    return mix(np.arange(BLOCK_WORDS, dtype=np.uint64)) | np.uint64(1)


def outer_weights(seed: int, first_block: int, count: int) -> Words:
    return mix(np.arange(first_block, first_block + count, dtype=np.uint64) + np.uint64(seed)) | np.uint64(1)


def outer_weight(seeds: Words) -> Words:
    """Returns the weight of the first block for each seed."""
    return mix(seeds) | np.uint64(1)


@functools.lru_cache(maxsize=1 << 20)  # more than any model's: a list that does not fit is hashed anew in each push
def seed_of(meta: TensorMeta) -> int:
    return xxhash.xxh3_64_intdigest(f"{meta.name}|{meta.dtype}|{tuple(meta.shape)}".encode())


def partial(data: Bytes, seed: int, first_block: int = 0) -> int:
    """Returns the sum over `data`, the bytes that start at block `first_block` of the tensor.
    The digest is the seed plus all partial sums."""
    blocks, rest = divmod(data.size, BLOCK_BYTES)
    total = int((block_sums(data[: blocks * BLOCK_BYTES]) * outer_weights(seed, first_block, blocks)).sum())
    if rest:
        tail = np.zeros(BLOCK_BYTES, np.uint8)
        tail[:rest] = data[blocks * BLOCK_BYTES :]
        total += partial(tail, seed, first_block + blocks)
    return total & MASK


def partials(data: Sequence[Bytes]) -> list[int]:
    """Returns the sum of each piece of `data` with seed 0, computed on all cores."""
    jobs = [(index, piece[at : at + CHUNK], at // BLOCK_BYTES) for index, piece in enumerate(data) for at in range(0, piece.size, CHUNK)]
    sums = [0 for _ in data]
    for (index, _, _), got in zip(jobs, _on_all_cores(lambda job: partial(job[1], 0, job[2]), jobs), strict=True):
        sums[index] = (sums[index] + got) & MASK
    return sums


_of_thread = threading.local()


def _scratch() -> Words:
    """Returns this thread's scratch memory. Fresh pages for each call would cost as much as the
    sum."""
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty((STRIP_BLOCKS, BLOCK_WORDS), np.uint64)
    scratch: Words = _of_thread.scratch
    return scratch


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor in C order: a view for a contiguous tensor on the CPU, else
    a copy. uint8 [N]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest(tensor: torch.Tensor, meta: TensorMeta) -> int:
    """Returns the digest of a whole tensor on any device. `meta` gives its name and shape."""
    seed = seed_of(meta)
    return (seed + partial(as_bytes(tensor), seed)) & MASK


def unordered(tensor: torch.Tensor) -> int:
    """Returns 64 bits that depend on a tensor's elements and not on their order. They are equal
    for two layouts of the same elements, and additive over parts."""
    bits = as_bytes(tensor).view(f"u{tensor.element_size()}")
    return sum(int(mix(bits[at : at + CHUNK].astype(np.uint64)).sum()) for at in range(0, bits.size, CHUNK)) & MASK


def digests(data: Bytes, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> dict[str, int]:
    """Returns the digests of tensors in `data`. Each begins at a multiple of BLOCK_BYTES and is
    followed by zeros up to the next one."""
    return from_sums(all_sums(data), tensors, offsets)


def all_sums(data: Bytes, words: int = BLOCK_WORDS) -> Words:
    """Returns `block_sums` of `data`, computed on all cores. `data` is a whole number of blocks,
    whatever tensors they belong to."""
    return np.concatenate(_by_strips(functools.partial(block_sums, words=words), data, 8 * words) or [np.empty(0, np.uint64)])


class Blocks:
    """Tensors that each begin a block, in a run of blocks. Worked out once: it is a few operations
    for each block."""

    def __init__(self, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> None:
        self.names = [meta.name for meta in tensors]
        self.counts = np.array([-(-meta.nbytes // BLOCK_BYTES) for meta in tensors], np.int64)
        self.ends = np.cumsum(self.counts)
        within = np.arange(self.counts.sum()) - np.repeat(self.ends - self.counts, self.counts)
        self.seeds = np.array([seed_of(meta) for meta in tensors], np.uint64)
        first = np.array([offsets[meta.name] // BLOCK_BYTES for meta in tensors], np.int64)
        self.blocks = np.repeat(first, self.counts) + within
        self.outer = mix(within.astype(np.uint64) + np.repeat(self.seeds, self.counts)) | np.uint64(1)

    def digests(self, sums: Words) -> dict[str, int]:
        """Returns the digest of each tensor from the sums of all blocks of the run."""
        running = np.concatenate([[np.uint64(0)], np.cumsum(sums[self.blocks] * self.outer, dtype=np.uint64)])
        totals = running[self.ends] - running[self.ends - self.counts] + self.seeds
        return dict(zip(self.names, totals.tolist(), strict=True))


def from_sums(sums: Words, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> dict[str, int]:
    """Returns the digests of `digests` from the block sums."""
    return Blocks(tensors, offsets).digests(sums)


def non_finite(data: Bytes, tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> list[str]:
    """Returns the names of tensors with a NaN or an infinity. They lie in `data` as for
    `digests`."""
    return from_flags({dtype: all_flags(data, dtype) for dtype in {meta.dtype for meta in tensors}}, tensors, offsets)


def all_flags(data: Bytes, dtype: str, row_bytes: int = BLOCK_BYTES) -> Flags:
    """Returns for each block, or other row of bytes, whether, read as `dtype`, it holds a number
    that is not finite. bool [rows]."""
    if dtype not in _NON_FINITE:
        return np.zeros(data.size // row_bytes, np.bool_)
    rows = functools.partial(_non_finite_rows, dtype=dtype, row_bytes=row_bytes)
    return np.concatenate(_by_strips(rows, data, row_bytes) or [np.empty(0, np.bool_)])


def from_flags(flags: Mapping[str, Flags], tensors: Sequence[TensorMeta], offsets: Mapping[str, int]) -> list[str]:
    """Returns the names of `non_finite` from the flags of each dtype."""
    found = []
    for meta in tensors:
        first, count = offsets[meta.name] // BLOCK_BYTES, -(-meta.nbytes // BLOCK_BYTES)
        if flags[meta.dtype][first : first + count].any():
            found.append(meta.name)
    return found


def _by_strips(job: Callable[[Bytes], Result], data: Bytes, row_bytes: int) -> list[Result]:
    """Runs a job on pieces of whole rows, of CHUNK bytes at most."""
    step = CHUNK // row_bytes * row_bytes
    return _on_all_cores(job, [data[at : at + step] for at in range(0, data.size, step)])


def _on_all_cores(job: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Runs a job for each item, on all cores that this process may use. A single item needs no
    thread."""
    if len(items) < 2:
        return [job(item) for item in items]
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        return list(pool.map(job, items))


def block_sums(data: Bytes, words: int = BLOCK_WORDS) -> Words:
    """Returns the inner sum of each block of `data`, a whole number of blocks. uint64 [blocks].
    words: of a block, at most BLOCK_WORDS."""
    rows = data.view(np.uint64).reshape(-1, words)
    sums = np.empty(len(rows), np.uint64)
    step = STRIP_BLOCKS * BLOCK_WORDS // words
    scratch, weights = _scratch().reshape(-1)[: step * words].reshape(step, words), inner_weights()[:words]
    for start in range(0, len(rows), step):
        strip = rows[start : start + step]
        folded = np.right_shift(strip, np.uint64(32), out=scratch[: len(strip)])
        folded += strip
        np.einsum("ij,j->i", folded, weights, out=sums[start : start + len(strip)])
    return sums


def cores() -> int:
    """Returns how many cores to use: those of this process, at most eight. More do not make
    memory faster."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def total(digests: dict[str, int]) -> str:
    """Returns one digest of a whole version, 16 hexadecimal digits."""
    return f"{sum(digests.values()) & MASK:016x}"


# Exponent bits all ones: the smallest bit pattern, sign aside, that is not a finite number.
_NON_FINITE = {
    "float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "bfloat16": 0x7F80, "float16": 0x7C00, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def has_non_finite(data: Bytes, dtype: str) -> bool:
    """Whether bytes of this dtype hold a NaN or an infinity (in float8_e4m3fn: a NaN)."""
    return bool(data.size) and dtype in _NON_FINITE and bool(_non_finite_rows(data, dtype, data.size).any())


def _non_finite_rows(data: Bytes, dtype: str, row_bytes: int) -> Flags:
    """Returns for each row of bytes whether it holds a NaN or an infinity. Two maxima decide it,
    far faster than `isfinite`. Read as signed integers the positive non-finite patterns are the
    largest, read as unsigned ones the negative patterns are."""
    size, bound = ITEM_BYTES[dtype], _NON_FINITE[dtype]
    unsigned = data.view(_UNSIGNED[size]).reshape(-1, row_bytes // size)
    sign = 1 << (8 * size - 1)
    flags: Flags = (unsigned.view(f"i{size}").max(axis=1) >= bound) | (unsigned.max(axis=1) >= bound + sign)
    return flags
