"""Facts about one tensor of a trainer: whether it can be sent, and whether it shares memory with
another."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from instep.digest import as_bytes, partials
from instep.digest_cuda import memory_sums
from instep.errors import SourceError
from instep.protocol import ITEM_BYTES, dtype_name


def identity(tensor: torch.Tensor) -> Hashable:
    """Returns a key that is equal for two tensors that are the same elements of the same memory:
    tied weights."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Returns PyTorch's counters of in-place changes. Inference tensors have none. Writes through
    `tensor.data` or a NumPy view are not counted, nor are those of fused optimizers."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a 64-bit sum of the bytes of each tensor, on any device."""
    found: dict[int, int] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        some = [tensors[index] for index in here]
        found.update(zip(here, memory_sums(some) if device.type == "cuda" else partials(list(map(as_bytes, some))), strict=True))
    return [found[index] for index in range(len(tensors))]


def check(name: str, tensor: torch.Tensor) -> None:
    """Raises `SourceError` unless the tensor's memory holds its logical values in a dtype that can
    be sent."""
    reason = _refusal(tensor)
    if reason is not None:
        problem, next_step = reason
        raise SourceError(f"{name} {problem}", tensor=name, next_step=next_step)


def _refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    packed: bool = is_traceable_wrapper_subclass(tensor)
    if any(getattr(tensor, mark, None) is not None for mark in ("quant_state", "SCB")):
        return "is quantised: its bytes are packed, not the weight", "dequantise the trainer's model, or train on an unquantised base"
    if packed:
        return f"is a {type(tensor).__name__}: its values are sharded or packed", "gather or unpack it, then push the plain state dict"
    if tensor.is_meta:
        return "is on the meta device: it has no values", "load or materialise the model first"
    if hasattr(tensor, "ds_numel") and tensor.numel() == 0:
        return "is partitioned by ZeRO-3: this rank holds a placeholder", "gather the parameters around the push"
    if tensor.numel() == 0:
        return f"has no elements (shape {tuple(tensor.shape)}): a placeholder of a sharded model?", "push gathered weights"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}", "convert it with to_dense()"
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        return f"has dtype {dtype_name(tensor.dtype)}, which cannot travel", f"convert it to one of {', '.join(ITEM_BYTES)}"
    return None
