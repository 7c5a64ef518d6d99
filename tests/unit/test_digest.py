"""The digest against its own formula, and what it must notice. Invariant 5: the label changes only after the digests agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from instep.digest import BLOCK_BYTES, CHUNK, MASK, STRIP_BLOCKS, Bytes, as_bytes, digest, digests, has_non_finite, partial, seed_of, total
from instep.protocol import ITEM_BYTES, TensorMeta


def mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def formula(data: bytes, meta: TensorMeta) -> int:
    """The docstring of `instep.digest`, word by word, in Python's own integers."""
    seed = xxhash.xxh3_64_intdigest(f"{meta.name}|{meta.dtype}|{meta.shape}".encode())
    result = seed
    for k in range(-(-len(data) // 8)):
        x = int.from_bytes(data[8 * k : 8 * k + 8].ljust(8, b"\0"), "little")
        weight = (mix((seed + k // 4096) & MASK) | 1) * (mix(k % 4096) | 1)
        result += weight * (x + (x >> 32))
    return result & MASK


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def meta_of(size: int, name: str = "model.w") -> TensorMeta:
    return TensorMeta(name, "uint8", (size,))


def whole_blocks(data: Bytes) -> Bytes:
    """The data, followed by zeros up to the next block."""
    return np.concatenate([data, np.zeros(-data.size % BLOCK_BYTES, np.uint8)])


SIZES = (0, 1, 7, 8, 9, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 3, STRIP_BLOCKS * BLOCK_BYTES + 5)


@pytest.mark.parametrize("size", SIZES)
def test_equals_the_formula(size: int) -> None:
    data, meta = noise(size), meta_of(size)
    expected = formula(data.tobytes(), meta)
    assert digest(torch.from_numpy(data), meta) == expected
    assert digests(whole_blocks(data), [meta], {meta.name: 0}) == {meta.name: expected}


@pytest.mark.parametrize("size", [CHUNK, CHUNK + BLOCK_BYTES + 11, 2 * CHUNK + 1])
def test_threads_share_a_large_tensor(size: int) -> None:
    data, meta = noise(size), meta_of(size)
    assert digests(whole_blocks(data), [meta], {meta.name: 0}) == {meta.name: digest(torch.from_numpy(data), meta)}


@given(st.binary(max_size=300), st.text(max_size=20))
def test_equals_the_formula_for_any_bytes_and_name(data: bytes, name: str) -> None:
    meta = meta_of(len(data), name)
    assert digest(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), meta) == formula(
        data, meta
    )


@given(st.integers(1, 3000), st.data())
def test_parts_that_are_zero_elsewhere_add_up(count: int, data: st.DataObject) -> None:
    """Sums over shards equal the sum over the whole, however elements are dealt out."""
    whole = torch.from_numpy(noise(2 * count)).view(torch.int16)
    owner = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 3, count))
    meta = TensorMeta("w", "int16", (count,))
    seed = seed_of(meta)
    parts = sum(partial(as_bytes(torch.where(owner == shard, whole, 0)), seed) for shard in range(3))
    assert (seed + parts) & MASK == digest(whole, meta)


@pytest.mark.parametrize("blocks", [1, STRIP_BLOCKS + 1])
def test_partial_sums_of_block_ranges_add_up(blocks: int) -> None:
    data, meta = noise((blocks + 2) * BLOCK_BYTES + 100), meta_of((blocks + 2) * BLOCK_BYTES + 100)
    seed, cut = seed_of(meta), blocks * BLOCK_BYTES
    assert (seed + partial(data[:cut], seed) + partial(data[cut:], seed, blocks)) & MASK == digest(torch.from_numpy(data), meta)


def test_every_single_bit_counts() -> None:
    """Flips in the top bit of a lane are signs; a product modulo 2^64 alone would lose the uppermost ones."""
    tensor = torch.from_numpy(noise(64)).view(torch.int64)
    meta = TensorMeta("w", "int64", (8,))
    seen = {digest(tensor, meta)}
    for word in range(8):
        for bit in range(64):
            flipped = tensor.clone()
            flipped[word] ^= -(1 << 63) if bit == 63 else 1 << bit
            seen.add(digest(flipped, meta))
    assert len(seen) == 1 + 8 * 64


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from([15, 31, 47, 63]), st.sampled_from([15, 31, 47, 63]))
def test_two_sign_flips_do_not_cancel(first: int, second: int, bit: int, other_bit: int) -> None:
    words = np.zeros(1000, np.uint64)
    words[first] ^= np.uint64(1 << bit)
    words[second] ^= np.uint64(1 << other_bit)
    if not words.any():
        return
    assert partial(words.view(np.uint8), seed=5) != 0


@given(st.integers(0, 4095), st.integers(0, 9000))
def test_a_swap_is_seen(near: int, far: int) -> None:
    """Position-keyed: the same elements in another order are another tensor, within a block and across blocks."""
    tensor = torch.arange(1, 9002, dtype=torch.int16)
    swapped = tensor.clone()
    swapped[[near, far]] = swapped[[far, near]]
    meta = TensorMeta("w", "int16", (9001,))
    assert (digest(tensor, meta) == digest(swapped, meta)) == (near == far)


@pytest.mark.parametrize(
    "other", [TensorMeta("v", "int16", (4, 6)), TensorMeta("w", "bfloat16", (4, 6)), TensorMeta("w", "int16", (6, 4))], ids=str
)
def test_name_dtype_and_shape_are_part_of_it(other: TensorMeta) -> None:
    tensor = torch.zeros(4, 6, dtype=torch.int16)
    assert digest(tensor, TensorMeta("w", "int16", (4, 6))) != digest(tensor, other)


def test_strides_are_not_part_of_it() -> None:
    tensor = torch.randn(6, 4)
    meta = TensorMeta("w", "float32", (4, 6))
    assert digest(tensor.t(), meta) == digest(tensor.t().contiguous(), meta)


def test_total_does_not_depend_on_the_order() -> None:
    assert total({"a": MASK, "b": 2}) == total({"b": 2, "a": MASK}) == f"{1:016x}"


FLOATS = [dtype for dtype in ITEM_BYTES if "float" in dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_table(dtype: str) -> None:
    kind = getattr(torch, dtype)
    info = torch.finfo(kind)
    finite = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2, -info.smallest_normal / 2, 1.0]
    for value in finite:
        assert not has_non_finite(as_bytes(torch.tensor([1.0, value], dtype=torch.float64).to(kind)), dtype), value
    for value in [math.nan, *([] if dtype == "float8_e4m3fn" else [math.inf])]:
        for sign in (1.0, -1.0):
            tensor = torch.tensor([1.0, math.copysign(value, sign), 1.0], dtype=torch.float64).to(kind)
            assert not torch.isfinite(tensor.double()).all()
            assert has_non_finite(as_bytes(tensor), dtype), (value, sign)


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_agrees_with_pytorch(dtype: str) -> None:
    """On every pattern of one byte, and on every sign and exponent with a few mantissas of longer types."""
    size = ITEM_BYTES[dtype]
    upper = [pattern for pattern in range(256 if size == 1 else 1 << 16) if size == 1 or pattern % 64 in (0, 1, 63)]
    patterns = np.array(upper, np.uint64) << np.uint64(max(0, 8 * size - 16))
    patterns = patterns.astype(f"u{size}")
    expected = ~torch.isfinite(torch.from_numpy(patterns).view(getattr(torch, dtype)).double()).numpy()
    found = [has_non_finite(pattern.view(np.uint8), dtype) for pattern in patterns[:, None]]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEM_BYTES if dtype not in FLOATS])
def test_integers_are_finite(dtype: str) -> None:
    assert not has_non_finite(np.full(16, 255, np.uint8), dtype)
