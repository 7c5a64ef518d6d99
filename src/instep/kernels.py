# mypy: ignore-errors
"""Triton kernels. Imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def mix(z):
    """The finaliser of SplitMix64 with its lowest bit set, in signed arithmetic: shifts are masked
    to be logical ones."""
    z += -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def fold(word):
    return word + ((word >> 32) & 0xFFFFFFFF)


@triton.jit
def move(runs, of_program, weights, sums, flags, COPY: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Moves SPAN tiles of TILE words and adds them to their run's slot of `sums`. Marks in
    `flags` the slots with numbers that are not finite.

    The columns of `runs` are those of `digest_cuda.Table`; BLOCK is a multiple of TILE. Sums are
    brought together once for all tiles: with an atomic addition for each the kernel takes half as
    long again. Words pass through the caches once, the weights of the digest stay in
    them: told so, it takes 4 % less to move and 8 % less to read alone.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, TILE)
    run = runs + tl.load(of_program + program) * 14
    source = tl.load(run).to(tl.pointer_type(tl.int64))
    target = tl.load(run + 1).to(tl.pointer_type(tl.int64))
    rows, row_words = tl.load(run + 2), tl.load(run + 3)
    position, seed, slot = tl.load(run + 6), tl.load(run + 8), tl.load(run + 9)
    mask, lowest, carry = tl.load(run + 11), tl.load(run + 12), tl.load(run + 13)
    first = (program - tl.load(run + 10)) * TILE * SPAN
    total = tl.zeros([TILE], dtype=tl.int64)
    # An exponent of ones carries into the sign's place when its lowest bit is added.
    carried = tl.zeros([TILE], dtype=tl.int64)
    if (rows == 1) & (position % TILE == 0):  # contiguous, and each tile within one block of the digest
        for tile in range(SPAN):
            index = first + tile * TILE + lane
            start = position + first + tile * TILE
            word = tl.load(source + index, mask=index < row_words, other=0, eviction_policy="evict_first")
            if COPY:
                tl.store(target + index, word, mask=index < row_words, cache_modifier=".cs")
            weight = tl.load(weights + start % BLOCK + lane, eviction_policy="evict_last")
            total += fold(word) * weight * mix(seed + start // BLOCK)
            carried |= ((word & mask) + lowest) & carry
    else:
        for tile in range(SPAN):
            index = first + tile * TILE + lane
            inside = index < rows * row_words
            row = index // row_words
            column = index % row_words
            word = tl.load(source + row * tl.load(run + 4) + column, mask=inside, other=0, eviction_policy="evict_first")
            if COPY:
                tl.store(target + row * tl.load(run + 5) + column, word, mask=inside, cache_modifier=".cs")
            at = position + row * tl.load(run + 7) + column
            weight = tl.load(weights + at % BLOCK, eviction_policy="evict_last")
            total += fold(word) * weight * mix(seed + at // BLOCK)
            carried |= ((word & mask) + lowest) & carry
    tl.atomic_add(sums + slot, tl.sum(total))
    if tl.max((carried != 0).to(tl.int32)) > 0:
        tl.atomic_max(flags + slot, 1)
