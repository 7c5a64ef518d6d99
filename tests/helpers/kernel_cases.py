"""Plays the Triton kernel in Triton's interpreter, over memory of this process, beside what numpy finds. A program of its own: Triton looks
at the variable when it is imported.

TRITON_INTERPRET=1 PYTHONPATH=tests python -m helpers.kernel_cases
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from helpers import pretend_cuda
from instep.digest import BLOCK_WORDS
from instep.digest_cuda import Run, Table
from instep.plan.rows import Rows

CPU = torch.device("cpu")
DTYPES = ["bfloat16", "float32", "float16", "float8_e4m3fn", "int8"]


def run(random: np.random.Generator, rows: int, length: int, dtype: str, slot: int) -> tuple[Run, torch.Tensor, torch.Tensor]:
    """Random words at random strides, with the memory that they lie in and room to move them to."""
    source_stride, target_stride, position_stride = (length + int(random.integers(0, 40)) for _ in range(3))
    memory = torch.from_numpy(random.integers(0, 1 << 62, rows * source_stride, dtype=np.int64))
    room = torch.zeros(rows * target_stride, dtype=torch.int64)
    position = int(random.choice([0, 1, BLOCK_WORDS - 3, 2 * BLOCK_WORDS]))
    places = memory.data_ptr() // 8, source_stride, room.data_ptr() // 8, target_stride
    return Run(Rows(rows, length, position, position_stride, *places), slot, int(random.integers(1, 1 << 62)), dtype), memory, room


def played(kind: Any, runs: list[Run], slots: int, *, copy: bool) -> tuple[list[int], list[bool]]:
    table = kind(runs, slots, CPU, copy=copy)
    table.launch()
    result: tuple[list[int], list[bool]] = table.result()
    return result


def main() -> None:
    patch.object(torch.cuda, "device", lambda _: nullcontext()).start()
    random = np.random.default_rng(0)
    shapes = [(1, 1), (1, 700), (1, 40000), (3, 1), (5, 130), (40, 433), (2, 5000)]  # two of them take two programs
    made = [run(random, *shape, DTYPES[index % len(DTYPES)], index % 4) for index, shape in enumerate(shapes * 2)]
    runs = [one[0] for one in made]
    for copy in (True, False):
        found = played(Table, runs, 4, copy=copy)
        moved = [room.clone() for _, _, room in made]
        for _, _, room in made:
            room.zero_()
        assert found == played(pretend_cuda.Table, runs, 4, copy=copy)
        assert any(found[0])
        assert any(found[1])
        assert all(torch.equal(there, room) for there, (_, _, room) in zip(moved, made, strict=True))
        assert copy == all(room.any() for room in moved)
        for _, _, room in made:
            room.zero_()
    print("equal")


if __name__ == "__main__":
    main()
