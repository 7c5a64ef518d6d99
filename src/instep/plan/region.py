"""Strided boxes of elements in a flat index space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from instep.protocol import Region

Box = tuple[tuple[int, int], ...]
"""A half-open interval for each dimension of a tensor."""


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a C-contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def whole(shape: Sequence[int]) -> Region:
    return Region(0, tuple(shape), contiguous_stride(shape))


def simplify(region: Region) -> Region:
    """Returns the same elements in the same order in as few dimensions as possible. Sizes of one
    are dropped, adjacent dimensions merged."""
    shape: list[int] = []
    stride: list[int] = []
    for size, step in zip(region.shape, region.stride, strict=True):
        if size == 1:
            continue
        if shape and stride[-1] == size * step:
            shape[-1] *= size
            stride[-1] = step
        else:
            shape.append(size)
            stride.append(step)
    return Region(region.offset, tuple(shape), tuple(stride))


def run(region: Region, start: int, count: int) -> Region | None:
    """Returns `count` elements of a region, in order, from index `start` on. None unless they are
    whole rows along some axis."""
    offset, shape, stride = region.offset, region.shape, region.stride
    while shape and count < (row := math.prod(shape[1:])):  # within one row
        offset, start, shape, stride = offset + start // row * stride[0], start % row, shape[1:], stride[1:]
        if start + count > row:
            return None
    if not shape:
        return Region(offset, (), ()) if count == 1 else None
    if count % row or start % row:
        return None
    return Region(offset + start // row * stride[0], (count // row, *shape[1:]), stride)


def reshaped(region: Region, shape: tuple[int, ...]) -> Region | None:
    """Returns the same elements in the same order in another shape. None where they are no
    contiguous run."""
    if region.shape == shape:
        return region
    return Region(region.offset, shape, contiguous_stride(shape)) if simplify(region).stride in ((), (1,)) else None


def extent(region: Region) -> tuple[int, int]:
    """Returns the first flat index and one past the last. Empty regions have an empty extent."""
    if region.numel == 0:
        return region.offset, region.offset
    return region.offset, region.offset + 1 + sum((size - 1) * step for size, step in zip(region.shape, region.stride, strict=True))


def as_box(region: Region, shape: Sequence[int]) -> Box | None:
    """Returns the region as intervals of a contiguous tensor of `shape`, or None where it is no
    such box."""
    first, last = extent(region)
    if last == first or last > math.prod(shape):
        return None
    strides = contiguous_stride(shape)
    box = []
    for size, step in zip(shape, strides, strict=True):
        low, high = first // step % size, (last - 1) // step % size
        if high < low:
            return None
        box.append((low, high + 1))
    inside = math.prod(high - low for low, high in box)
    canonical = simplify(Region(first, tuple(high - low for low, high in box), strides))
    return tuple(box) if inside == region.numel and set(_axes(canonical)) == set(_axes(simplify(region))) else None


def _axes(region: Region) -> list[tuple[int, int]]:
    return list(zip(region.shape, region.stride, strict=True))


def indices(region: Region) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns every flat index of the region, in its order. The array is as long as the region: it
    is for regions that are no boxes, and for tests."""
    grid = np.asarray(region.offset, np.int64)
    for size, step in zip(region.shape, region.stride, strict=True):
        grid = np.add.outer(grid, np.arange(size, dtype=np.int64) * step)
    return grid.reshape(-1)


def _may_repeat(region: Region) -> bool:
    """Whether the region may hold an element more than once, as an expanded tensor does."""
    span = 0
    for size, step in sorted(_axes(region), key=lambda axis: axis[1]):
        if size > 1 and step <= span:
            return True
        span += (size - 1) * step
    return False


def _overlap(a: Box, b: Box) -> bool:
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b, strict=True))


def disjoint(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Whether no element of a contiguous tensor of `shape` belongs to two of the regions."""
    spans = sorted(((extent(region), region) for region in regions if region.numel), key=lambda span: span[0])
    if all(before[0][1] <= after[0][0] for before, after in pairwise(spans)):
        return True
    boxes = [as_box(region, shape) for _, region in spans]
    if any(box is None for box in boxes):
        flat = np.concatenate([indices(region) for _, region in spans])
        return len(np.unique(flat)) == len(flat)
    # Sorted by their first element, so a box can only meet those that start before it ends.
    for i, box in enumerate(boxes):
        for j in range(i + 1, len(boxes)):
            if spans[j][0][0] >= spans[i][0][1]:
                break
            if _overlap(box, boxes[j]):  # type: ignore[arg-type]
                return False
    return True


def covered(regions: Iterable[Region], shape: Sequence[int]) -> int:
    """Returns how many elements of a contiguous tensor of `shape` belong to at least one region."""
    distinct = list({simplify(region): region for region in regions}.values())
    if disjoint(distinct, shape) and not any(map(_may_repeat, distinct)):
        return sum(region.numel for region in distinct)
    return len(np.unique(np.concatenate([indices(region) for region in distinct])))


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns `region` of a contiguous tensor, or of the memory from its first element on, without
    a copy."""
    return tensor.as_strided(region.shape, region.stride, int(tensor.storage_offset()) + region.offset)


def strided(source: Region, target: Region, shape: Sequence[int], stride: Sequence[int]) -> tuple[Region, Region] | None:
    """Works out a copy into a tensor of `shape` that lies in memory with `stride`, not in C order.

    target: a region of the tensor's flat index space. Returns the two regions cut into the same
    axes; the target's is in memory, counted from the tensor's first element. None where strides do
    not express the copy.
    """
    if target.numel == 0:
        return None
    sizes, steps = list(shape), contiguous_stride(shape)
    first = [target.offset // step % size for size, step in zip(sizes, steps, strict=True)]
    room = [size - 1 - at for size, at in zip(sizes, first, strict=True)]
    cut: list[tuple[int, int, int]] = []  # size, source stride, target stride in memory
    axes = list(zip(target.shape, source.stride, target.stride, strict=True))
    while axes:
        size, of_source, step = axes.pop()
        if size == 1:
            continue
        axis = next((axis for axis in range(len(sizes)) if step and step % steps[axis] == 0 and step // steps[axis] < sizes[axis]), None)
        if axis is None:
            return None
        by = step // steps[axis]
        fits = room[axis] // by + 1
        if size > fits:  # it goes on in the next axis, where it fills this one
            if size % fits or step * fits != (steps[axis - 1] if axis else 0):
                return None
            axes.append((size // fits, of_source * fits, step * fits))
        size = min(size, fits)
        room[axis] -= (size - 1) * by
        cut.append((size, of_source, by * stride[axis]))
    cut.reverse()
    made = tuple(size for size, _, _ in cut)
    offset = sum(at * step for at, step in zip(first, stride, strict=True))
    return Region(source.offset, made, tuple(s for _, s, _ in cut)), Region(offset, made, tuple(t for _, _, t in cut))
