"""Digests each tensor of the model in an engine's workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from instep.engine.vllm.worker import WorkerExtension

CACHES = ("kv_cache",)
"""Attributes of modules that hold what was computed for requests, no weights."""


class FamilyWorker(WorkerExtension):
    """A worker extension, mixed into vLLM's worker by `worker_extension_cls`."""

    def live_digests(self) -> dict[str, str]:
        """Returns the dtype, shape and digest of every tensor of the model, by name: parameters,
        buffers, and plain attributes of modules. Padding that no loader writes is included."""
        model = self.get_model()  # type: ignore[attr-defined]
        return {name: _digest(tensor) for name, tensor in _tensors(model)}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and name not in CACHES:
                yield f"{path}.{name}", value


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_64_hexdigest(data)}"
