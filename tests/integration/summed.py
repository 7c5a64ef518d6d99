"""A worker extension for tests: tells what the worker holds, where vLLM's CPU build cannot generate."""

from __future__ import annotations

import torch
import xxhash

from instep.digest import as_bytes
from instep.engine.vllm.worker import WorkerExtension


class SummingExtension(WorkerExtension):
    def held(self) -> dict[str, str]:
        """The dtype, shape and a sum of each parameter and buffer of the worker's model."""
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: f"{one.dtype} {list(one.shape)} {xxhash.xxh3_64_hexdigest(as_bytes(one).data)}" for name, one in tensors}
