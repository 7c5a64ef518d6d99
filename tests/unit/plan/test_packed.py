"""Small tensors side by side: where they lie, and that each keeps a digest of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from instep.digest import BLOCK_BYTES, all_flags, digest
from instep.plan.packed import ALIGN, Packed, packed
from instep.plan.sums import check_parts
from instep.protocol import TensorMeta

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "scalar": ("float32", ()),
    "large": ("bfloat16", (3, BLOCK_BYTES // 4)),
    "odd": ("int8", (7,)),
    "line": ("bfloat16", (32,)),
    "empty": ("float32", (0, 4)),
    "line too": ("float32", (2, 8)),
    "one block": ("uint8", (BLOCK_BYTES,)),
    "nearly": ("uint8", (BLOCK_BYTES - 1,)),
    "double": ("float64", (5, 5)),
}


def filled(places: Packed, *, seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    generator, view, values = torch.Generator().manual_seed(seed), np.zeros(places.size, np.uint8), {}
    for meta in places.tensors:
        if not meta.alias_of:
            values[meta.name] = torch.randint(0, 100, meta.shape, generator=generator).to(getattr(torch, meta.dtype))
            view[places.offsets[meta.name] :][: meta.nbytes] = values[meta.name].contiguous().reshape(-1).view(torch.uint8).numpy()
    return view, values


@pytest.fixture
def metas() -> list[TensorMeta]:
    made = [TensorMeta(name, *what) for name, what in SHAPES.items()]
    return [*made, TensorMeta("tied", "bfloat16", (32,), "line")]


@pytest.mark.parametrize("small", [True, False])
def test_each_tensor_has_the_digest_that_it_has_alone(metas: list[TensorMeta], small: bool) -> None:
    places = Packed(metas, small=small)
    view, values = filled(places)
    assert places.digests(view) == {meta.name: digest(values[meta.name], meta) for meta in metas if not meta.alias_of}


def test_no_two_tensors_overlap_and_each_begins_at_a_cache_line(metas: list[TensorMeta]) -> None:
    places, end = packed(metas), 0
    by_name = {meta.name: meta for meta in metas}
    for name, at in sorted(places.offsets.items(), key=lambda item: (item[1], by_name[item[0]].nbytes)):
        assert at >= end
        assert at % ALIGN == 0
        end = at + by_name[name].nbytes
    assert end <= places.size
    assert places.offsets.keys() == SHAPES.keys()


def test_a_hundred_thousand_tensors_of_64_bytes_take_no_more_than_their_bytes() -> None:
    metas = [TensorMeta(f"t{index}", "bfloat16", (32,)) for index in range(100_000)]
    assert packed(metas).size == 64 * len(metas)


@pytest.mark.parametrize("size", [65, 4096, 17_000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 7])
def test_tensors_of_any_size_take_at_most_twice_their_bytes(size: int) -> None:
    assert packed([TensorMeta(f"t{index}", "uint8", (size,)) for index in range(9)]).size < 2 * 9 * size


@pytest.mark.parametrize("count", [2, 3, 40])
def test_shares_of_several_workers_add_up(metas: list[TensorMeta], count: int) -> None:
    places = packed(metas)
    view, values = filled(places)
    shares = [places.digests(view, (index, count)) for index in range(count)]
    check_parts("engine", metas, {name: digest(values[name], meta) for name, meta in zip(SHAPES, metas, strict=False)}, shares)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "empty"])
def test_a_bit_that_flips_changes_the_digest_of_its_tensor_alone(metas: list[TensorMeta], name: str) -> None:
    places = packed(metas)
    view, _ = filled(places)
    before = places.digests(view)
    view[places.offsets[name]] ^= 1
    assert [key for key, value in places.digests(view).items() if value != before[key]] == [name]


@pytest.mark.parametrize("name", ["scalar", "line", "line too", "double", "large"])
def test_the_tensor_with_a_nan_is_named_and_no_other(metas: list[TensorMeta], name: str) -> None:
    places = packed(metas)
    view, values = filled(places)
    values[name].view(-1)[-1] = float("nan")
    meta = next(meta for meta in metas if meta.name == name)
    view[places.offsets[name] :][: meta.nbytes] = values[name].reshape(-1).view(torch.uint8).numpy()
    flags = {dtype: all_flags(view[: places.edge], dtype) for dtype in {meta.dtype for meta in metas}}
    assert places.non_finite(flags, view) == [name]


def test_an_equal_list_is_laid_out_once(metas: list[TensorMeta]) -> None:
    places = packed(metas)
    assert packed(list(metas)) is places
    assert packed(metas, small=False) is not places
    assert packed([TensorMeta("scalar", "float64", ()), *metas[1:]]) is not places
