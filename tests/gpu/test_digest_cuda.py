"""The digest kernel gives what the CPU gives, for whole tensors and for the parts that tensor-parallel workers hold."""

from __future__ import annotations

import pytest
import torch

from instep.digest import MASK, digest, seed_of
from instep.digest_cuda import Table, in_one, run_of
from instep.plan.rows import Rows
from instep.protocol import TensorMeta


def meta_of(tensor: torch.Tensor, name: str = "w") -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.mark.parametrize("shape", [(4,), (4096,), (3, 4096 * 4), (1000, 1004), (151, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, device="cuda").to(dtype)
    meta = meta_of(tensor)
    table = Table([in_one(tensor.data_ptr(), meta, 0)], 1, tensor.device, copy=False)
    table.launch()
    assert (seed_of(meta) + table.result()[0][0]) & MASK == digest(tensor.cpu(), meta)


def test_column_slices_add_up_and_are_moved() -> None:
    tensor = torch.randn(300, 1024, device="cuda").to(torch.bfloat16)
    meta = meta_of(tensor)
    parts = [torch.zeros(300, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    seed = seed_of(meta)
    places = [(tensor.data_ptr() + 1024 * i, parts[i].data_ptr()) for i in range(2)]
    rows = [Rows(300, 128, 128 * i, 256, source // 8, 256, target // 8, 128) for i, (source, target) in enumerate(places)]
    runs = [run_of(some, meta, 0) for some in rows]
    table = Table(runs, 1, tensor.device, copy=True)
    table.launch()
    assert (seed + table.result()[0][0]) & MASK == digest(tensor.cpu(), meta)
    assert torch.equal(parts[0], tensor[:, :512])
    assert torch.equal(parts[1], tensor[:, 512:])


def test_column_shards_are_moved_to_where_they_belong_and_add_up() -> None:
    """Rows that lie one after the other in memory, but not in the tensor."""
    tensor = torch.randn(300, 1024, device="cuda").to(torch.bfloat16)
    meta, whole = meta_of(tensor), torch.zeros_like(tensor)
    shards = [tensor[:, :640].contiguous(), tensor[:, 640:].contiguous()]
    seed = seed_of(meta)
    runs = [
        run_of(Rows(300, words, at, 256, shard.data_ptr() // 8, words, whole.data_ptr() // 8 + at, 256), meta, 0)
        for shard, at, words in zip(shards, (0, 160), (160, 96), strict=True)
    ]
    table = Table(runs, 1, tensor.device, copy=True)
    table.launch()
    assert (seed + table.result()[0][0]) & MASK == digest(tensor.cpu(), meta)
    assert torch.equal(whole, tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, value: float) -> None:
    tensors = [torch.randn(5000, 4, device="cuda").to(dtype) for _ in range(2)]
    tensors[0][-1, 0] = torch.finfo(dtype).max
    tensors[1][4321, 3] = value
    runs = [in_one(t.data_ptr(), meta_of(t), slot) for slot, t in enumerate(tensors)]
    table = Table(runs, 2, tensors[0].device, copy=False)
    table.launch()
    assert table.result()[1] == [False, True]
