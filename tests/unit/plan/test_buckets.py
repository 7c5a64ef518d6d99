"""One run of bytes, cut into buckets: every byte of every tensor once, where the layout says, and digests that do not see the cuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.digest import digest
from instep.errors import SourceError
from instep.plan.buckets import ALIGN, buckets, layout, pieces
from instep.protocol import ITEM_BYTES, TensorMeta
from instep.transport.bucket_digests import HostTally, pack

SIZES = st.lists(st.sampled_from([0, 1, 3, ALIGN // 4 - 1, ALIGN // 4, ALIGN // 4 + 1, ALIGN, 3 * ALIGN // 4 + 5]), min_size=1, max_size=6)


def tensors_of(sizes: list[int]) -> tuple[list[TensorMeta], list[tuple[str, torch.Tensor]]]:
    values = [(f"t{index}", torch.randn(size)) for index, size in enumerate(sizes)]
    return [TensorMeta(name, "float32", tuple(value.shape)) for name, value in values], values


def run_of(metas: list[TensorMeta], values: list[tuple[str, torch.Tensor]], limit: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The buckets as they were when they were full, and what they are together. Their memory is reused, and dirty at first."""
    rooms = [torch.full((limit,), 7, dtype=torch.uint8) for _ in range(2)]
    packed = [bucket.clone() for bucket in pack(metas, values, limit, lambda index, size: rooms[index % 2][:size])]
    return packed, torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8)


@given(sizes=SIZES, blocks=st.integers(1, 5))
def test_packed_buckets_are_the_layout(sizes: list[int], blocks: int) -> None:
    metas, values = tensors_of(sizes)
    offsets, size = layout(metas)
    packed, run = run_of(metas, values, blocks * ALIGN)
    assert [len(bucket) for bucket in packed] == [high - low for low, high in buckets(size, blocks * ALIGN)]
    expected = torch.zeros(size, dtype=torch.uint8)
    for meta, (name, value) in zip(metas, values, strict=True):
        expected[offsets[name] : offsets[name] + meta.nbytes] = value.view(torch.uint8)
    assert torch.equal(run, expected)


@given(sizes=SIZES, blocks=st.integers(1, 5))
def test_pieces_find_every_tensor_again(sizes: list[int], blocks: int) -> None:
    metas, values = tensors_of(sizes)
    packed, _ = run_of(metas, values, blocks * ALIGN)
    found = {meta.name: torch.full((meta.nbytes,), 9, dtype=torch.uint8) for meta in metas}
    contents = list(pieces(metas, blocks * ALIGN))
    assert len(contents) == len(packed)
    for bucket, here in zip(packed, contents, strict=True):
        for meta, rows in here:
            assert rows.at % 8 == rows.place % 8 == 0
            found[meta.name][rows.at : rows.at + rows.length] = bucket[rows.place : rows.end]
    assert all(torch.equal(found[name], value.view(torch.uint8)) for name, value in values)


@given(sizes=SIZES, blocks=st.integers(1, 5), bad=st.integers(0, 5))
def test_digests_do_not_see_the_cuts(sizes: list[int], blocks: int, bad: int) -> None:
    metas, values = tensors_of(sizes)
    name, value = values[bad % len(values)]
    if value.numel():
        value[-1] = float("nan")
    tally = HostTally(metas, blocks * ALIGN, flags=True)
    for index, bucket in enumerate(run_of(metas, values, blocks * ALIGN)[0]):
        tally.add(index, bucket)
    digests, flagged = tally.result()
    assert digests == {meta.name: digest(value, meta) for meta, (_, value) in zip(metas, values, strict=True)}
    assert flagged == ((name,) if value.numel() else ())


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_values_are_cast_and_made_contiguous(dtype: str) -> None:
    meta = TensorMeta("w", dtype, (3, 5))
    value = torch.arange(15.0).view(5, 3).t()
    _, run = run_of([meta], [("w", value)], ALIGN)
    assert torch.equal(run[: meta.nbytes].view(getattr(torch, dtype)).view(3, 5), value.to(getattr(torch, dtype)))


A, B = TensorMeta("a", "float32", (4,)), TensorMeta("b", "float32", (2, 2))


@pytest.mark.parametrize(
    ("given", "tensor"),
    [
        ([("a", torch.ones(4))], "b"),
        ([("b", torch.ones(2, 2)), ("a", torch.ones(4))], "a"),
        ([("a", torch.ones(4)), ("b", torch.ones(4))], "b"),
        ([("a", torch.ones(4)), ("b", torch.ones(2, 2)), ("c", torch.ones(1))], "c"),
    ],
    ids=["missing", "in another order", "another shape", "one too many"],
)
def test_a_source_that_breaks_its_word(given: list[tuple[str, torch.Tensor]], tensor: str) -> None:
    with pytest.raises(SourceError) as caught:
        run_of([A, B], given, ALIGN)
    assert caught.value.tensor == tensor
