"""The digest of a tensor: 64 bits, keyed by position, additive over disjoint parts.

    seed      = xxh3_64("name|dtype|shape")
    x[k]      = k-th little-endian 64-bit word of the tensor's contiguous bytes, zero-padded at the end
    w[k]      = U[k // 4096] * T[k % 4096]      T[j] = mix(j) | 1,  U[b] = mix(seed + b) | 1
    digest    = seed + sum over k of  w[k] * (x[k] + (x[k] >> 32))                            (all modulo 2^64)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); the sum is
the multilinear hash of Carter and Wegman. The added `x >> 32` keeps a difference in a word's upper half from reaching the upper
bits of the product alone. Because the sum is linear in every element, parts of a tensor held by different processes, zero
elsewhere, add up to the digest of the whole: shards are compared without gathering them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
import xxhash

from instep.protocol import ITEM_BYTES, TensorMeta

BLOCK_WORDS = 4096
BLOCK_BYTES = 8 * BLOCK_WORDS
STRIP_BLOCKS = 16  # 512 KiB: a strip and its scratch stay in a core's second-level cache
MASK = (1 << 64) - 1

CHUNK = 128 * BLOCK_BYTES  # 4 MiB: one job of a thread

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def mix(z: Words) -> Words:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=1)
def inner_weights() -> Words:
    return mix(np.arange(BLOCK_WORDS, dtype=np.uint64)) | np.uint64(1)


def outer_weights(seed: int, first_block: int, count: int) -> Words:
    return mix(np.arange(first_block, first_block + count, dtype=np.uint64) + np.uint64(seed)) | np.uint64(1)


def seed_of(meta: TensorMeta) -> int:
    return xxhash.xxh3_64_intdigest(f"{meta.name}|{meta.dtype}|{tuple(meta.shape)}".encode())


def partial(data: Bytes, seed: int, first_block: int = 0) -> int:
    """The sum over `data`, the bytes that start at block `first_block` of the tensor. Add partials and the seed for a digest."""
    blocks, rest = divmod(data.size, BLOCK_BYTES)
    words = data[: blocks * BLOCK_BYTES].view(np.uint64).reshape(blocks, BLOCK_WORDS)
    sums = np.empty(blocks, np.uint64)
    scratch = _scratch()
    for start in range(0, blocks, STRIP_BLOCKS):
        strip = words[start : start + STRIP_BLOCKS]
        folded = np.right_shift(strip, np.uint64(32), out=scratch[: len(strip)])
        folded += strip
        np.einsum("ij,j->i", folded, inner_weights(), out=sums[start : start + len(strip)])
    total = int((sums * outer_weights(seed, first_block, blocks)).sum())
    if rest:
        tail = np.zeros(BLOCK_BYTES, np.uint8)
        tail[:rest] = data[blocks * BLOCK_BYTES :]
        total += partial(tail, seed, first_block + blocks)
    return total & MASK


_of_thread = threading.local()


def _scratch() -> Words:
    """Made once for each thread: fresh pages for each call would cost as much as the sum."""
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty((STRIP_BLOCKS, BLOCK_WORDS), np.uint64)
    scratch: Words = _of_thread.scratch
    return scratch


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in C order; a view for a contiguous tensor on the CPU, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest(tensor: torch.Tensor, meta: TensorMeta) -> int:
    """The digest of a whole tensor of any device, named and shaped as `meta` says."""
    seed = seed_of(meta)
    return (seed + partial(as_bytes(tensor), seed)) & MASK


def digests(items: Iterable[tuple[TensorMeta, Bytes]]) -> dict[str, int]:
    """The digest of each tensor, given its bytes in C order, on all cores that this process may use."""
    parts: dict[str, list[Future[int]]] = {}
    seeds = {}
    with ThreadPoolExecutor(max_workers=cores()) as pool:
        for meta, data in items:
            seeds[meta.name] = seed = seed_of(meta)
            parts[meta.name] = [pool.submit(partial, data[at : at + CHUNK], seed, at // BLOCK_BYTES) for at in range(0, data.size, CHUNK)]
        return {name: (seeds[name] + sum(job.result() for job in jobs)) & MASK for name, jobs in parts.items()}


def cores() -> int:
    """Cores that this process may use, at most eight: more do not make memory faster."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def total(digests: dict[str, int]) -> str:
    """One digest of a whole version, 16 hexadecimal digits."""
    return f"{sum(digests.values()) & MASK:016x}"


# Exponent bits all ones: the smallest bit pattern, sign aside, that is not a finite number.
_NON_FINITE = {
    "float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "bfloat16": 0x7F80, "float16": 0x7C00, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def has_non_finite(data: Bytes, dtype: str) -> bool:
    """Whether bytes of this dtype hold a NaN or an infinity (in float8_e4m3fn: a NaN).

    Two maxima decide it, far faster than `isfinite`: read as signed integers the positive non-finite patterns are the largest
    numbers, read as unsigned ones the negative patterns are.
    """
    bound = _NON_FINITE.get(dtype)
    if bound is None or not data.size:
        return False
    size = ITEM_BYTES[dtype]
    unsigned = data.view(_UNSIGNED[size])
    sign = 1 << (8 * size - 1)
    return int(unsigned.view(f"i{size}").max()) >= bound or int(unsigned.max()) >= bound + sign
