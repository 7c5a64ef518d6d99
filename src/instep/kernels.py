# mypy: ignore-errors
"""Triton kernels. Imported where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def mix(z):
    """The finaliser of SplitMix64 with its lowest bit set, in signed arithmetic: shifts are masked to be logical ones."""
    z += -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def fold(word):
    return word + ((word >> 32) & 0xFFFFFFFF)


@triton.jit
def move(runs, of_tile, weights, sums, flags, COPY: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Moves a tile of TILE words, adds it to its run's slot of `sums`, and marks in `flags` a slot with a number that is not finite.

    The columns of `runs` are those of `digest_cuda.Table`; BLOCK is a multiple of TILE.
    """
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE)
    run = runs + tl.load(of_tile + tile) * 14
    source = tl.load(run).to(tl.pointer_type(tl.int64))
    target = tl.load(run + 1).to(tl.pointer_type(tl.int64))
    rows, row_words = tl.load(run + 2), tl.load(run + 3)
    position, seed, slot = tl.load(run + 6), tl.load(run + 8), tl.load(run + 9)
    mask, lowest, carry = tl.load(run + 11), tl.load(run + 12), tl.load(run + 13)
    first = (tile - tl.load(run + 10)) * TILE
    index = first + lane
    start = position + first
    if (rows == 1) & (start % TILE == 0):  # contiguous, and within one block of the digest
        word = tl.load(source + index, mask=index < row_words, other=0)
        if COPY:
            tl.store(target + index, word, mask=index < row_words)
        total = mix(seed + start // BLOCK) * tl.sum(fold(word) * tl.load(weights + start % BLOCK + lane))
    else:
        inside = index < rows * row_words
        row = index // row_words
        column = index % row_words
        word = tl.load(source + row * tl.load(run + 4) + column, mask=inside, other=0)
        if COPY:
            tl.store(target + row * tl.load(run + 5) + column, word, mask=inside)
        at = position + row * tl.load(run + 7) + column
        total = tl.sum(fold(word) * mix(seed + at // BLOCK) * tl.load(weights + at % BLOCK))
    tl.atomic_add(sums + slot, total)
    # An exponent of ones carries into the sign's place when its lowest bit is added.
    if tl.max(((((word & mask) + lowest) & carry) != 0).to(tl.int32)) > 0:
        tl.atomic_max(flags + slot, 1)
