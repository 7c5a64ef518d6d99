"""Strided boxes against the plain sets of indices that they stand for. What the proof of a plan rests on (invariant 4)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from instep.plan.region import as_box, contiguous_stride, covered, disjoint, extent, indices, simplify, whole
from instep.protocol import Region

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def elements(region: Region) -> list[int]:
    """Flat indices in order, by counting."""
    return [
        region.offset + sum(i * step for i, step in zip(index, region.stride, strict=True))
        for index in itertools.product(*map(range, region.shape))
    ]


def region_of(view: torch.Tensor) -> Region:
    return Region(int(view.storage_offset()), tuple(view.shape), view.stride())


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A plain box of a contiguous tensor: one slice for each dimension."""
    view = torch.empty(shape, dtype=torch.uint8)
    for axis, size in enumerate(shape):
        low = draw(st.integers(0, size - 1))
        view = view.narrow(axis, low, draw(st.integers(1, size - low)))
    return view


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """What a loader may do to a tensor on its way: slices with steps, transposes, flattened and repeated dimensions."""
    view = draw(boxes(shape))
    for _ in range(draw(st.integers(0, 2))):
        if not view.ndim:
            break
        axis = draw(st.integers(0, view.ndim - 1))
        match draw(st.sampled_from(["step", "transpose", "select", "expand", "split"])):
            case "step":
                view = view[(slice(None),) * axis + (slice(None, None, draw(st.integers(1, 3))),)]
            case "transpose":
                view = view.transpose(0, axis)
            case "select":
                view = view.select(axis, draw(st.integers(0, view.shape[axis] - 1)))
            case "expand":
                view = view.unsqueeze(axis).expand(*view.shape[:axis], 3, *view.shape[axis:])
            case "split" if view.shape[axis] % 2 == 0:
                view = view.unflatten(axis, (2, -1))
    return view


@given(shapes)
def test_whole_is_every_element_in_order(shape: tuple[int, ...]) -> None:
    assert elements(whole(shape)) == list(range(math.prod(shape)))
    assert whole(shape).stride == contiguous_stride(shape)


@given(shapes.flatmap(views))
def test_indices_extent_and_simplify(view: torch.Tensor) -> None:
    region = region_of(view)
    wanted = elements(region)
    assert indices(region).tolist() == wanted
    assert extent(region) == (min(wanted), max(wanted) + 1)
    assert elements(simplify(region)) == wanted
    assert simplify(simplify(region)) == simplify(region)


@given(st.data())
def test_a_box_is_found_and_nothing_else_is_taken_for_one(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    view = data.draw(boxes(shape))
    box = as_box(region_of(view), shape)
    grid = np.arange(math.prod(shape)).reshape(shape)
    assert box is not None
    assert set(grid[tuple(slice(low, high) for low, high in box)].reshape(-1)) == set(elements(region_of(view)))


@given(st.data())
def test_what_is_called_a_box_has_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    region = region_of(data.draw(views(shape)))
    box = as_box(region, shape)
    assume(box is not None)
    assert box is not None
    grid = np.arange(math.prod(shape)).reshape(shape)
    assert sorted(grid[tuple(slice(low, high) for low, high in box)].reshape(-1)) == sorted(elements(region))


@settings(max_examples=200)
@given(st.data())
def test_disjoint_and_covered(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    kind = data.draw(st.sampled_from([boxes, views]))
    regions = [region_of(view) for view in data.draw(st.lists(kind(shape), max_size=4))]
    sets = [set(elements(region)) for region in regions]
    assert covered(regions, shape) == len(set().union(*sets))
    if all(len(found) == region.numel for found, region in zip(sets, regions, strict=True)):
        assert disjoint(regions, shape) == (sum(map(len, sets)) == len(set().union(*sets)))


@pytest.mark.parametrize("region", [Region(3, (0, 2), (2, 1)), Region(0, (2, 0), (0, 1))], ids=str)
def test_empty_regions_cover_nothing(region: Region) -> None:
    assert extent(region)[0] == extent(region)[1]
    assert indices(region).size == 0
    assert as_box(region, (4, 2)) is None
    assert disjoint([region, whole((4, 2)), region], (4, 2))
    assert covered([region], (4, 2)) == 0


def test_a_region_outside_its_tensor_is_no_box() -> None:
    assert as_box(Region(6, (3,), (1,)), (4, 2)) is None
