# mypy: ignore-errors
"""The copy of `instep.kernels.move` without its sums. Imported only where there is a GPU."""

import triton
import triton.language as tl


@triton.jit
def copy(runs, of_program, TILE: tl.constexpr, SPAN: tl.constexpr):
    """Moves SPAN tiles of TILE words. The columns of `runs` are those of `digest_cuda.Table`."""
    program = tl.program_id(0)
    run = runs + tl.load(of_program + program) * 14
    source = tl.load(run).to(tl.pointer_type(tl.int64))
    target = tl.load(run + 1).to(tl.pointer_type(tl.int64))
    rows, row_words = tl.load(run + 2), tl.load(run + 3)
    first = (program - tl.load(run + 10)) * TILE * SPAN + tl.arange(0, TILE)
    for tile in range(SPAN):
        index = first + tile * TILE
        if rows == 1:
            word = tl.load(source + index, mask=index < row_words, other=0)
            tl.store(target + index, word, mask=index < row_words)
        else:
            inside = index < rows * row_words
            row = index // row_words
            column = index % row_words
            word = tl.load(source + row * tl.load(run + 4) + column, mask=inside, other=0)
            tl.store(target + row * tl.load(run + 5) + column, word, mask=inside)
