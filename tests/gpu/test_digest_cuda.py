"""The digest kernel gives what the CPU gives, for whole tensors and for the parts that tensor-parallel workers hold."""

from __future__ import annotations

import pytest
import torch

from instep.digest import MASK, digest, seed_of
from instep.digest_cuda import Run, Table
from instep.protocol import TensorMeta


def meta_of(tensor: torch.Tensor, name: str = "w") -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.mark.parametrize("shape", [(4,), (4096,), (3, 4096 * 4), (1000, 1004), (151, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, device="cuda").to(dtype)
    meta = meta_of(tensor)
    words = meta.nbytes // 8
    table = Table([Run(tensor.data_ptr(), 0, 1, words, words, words, 0, seed_of(meta), 0, meta.dtype)], 1, tensor.device, copy=False)
    table.launch()
    assert (seed_of(meta) + table.result()[0][0]) & MASK == digest(tensor.cpu(), meta)


def test_column_slices_add_up_and_are_moved() -> None:
    tensor = torch.randn(300, 1024, device="cuda").to(torch.bfloat16)
    meta = meta_of(tensor)
    parts = [torch.zeros(300, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    seed = seed_of(meta)
    runs = [Run(tensor.data_ptr() + 1024 * i, parts[i].data_ptr(), 300, 128, 256, 128, 128 * i, seed, 0, meta.dtype) for i in range(2)]
    table = Table(runs, 1, tensor.device, copy=True)
    table.launch()
    assert (seed + table.result()[0][0]) & MASK == digest(tensor.cpu(), meta)
    assert torch.equal(parts[0], tensor[:, :512])
    assert torch.equal(parts[1], tensor[:, 512:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, value: float) -> None:
    tensors = [torch.randn(5000, 4, device="cuda").to(dtype) for _ in range(2)]
    tensors[0][-1, 0] = torch.finfo(dtype).max
    tensors[1][4321, 3] = value
    words = tensors[0].nbytes // 8
    runs = [Run(t.data_ptr(), 0, 1, words, words, words, 0, 1, slot, meta_of(t).dtype) for slot, t in enumerate(tensors)]
    table = Table(runs, 2, tensors[0].device, copy=False)
    table.launch()
    assert table.result()[1] == [False, True]
