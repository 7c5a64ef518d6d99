"""vLLM's CPU build packs linear weights when they are loaded. In a worker with this extension they
stay plain, as on a GPU: import the module in no other process."""

from __future__ import annotations

from typing import Any

import torch
from faulty import FaultyExtension
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class PlainExtension(FaultyExtension):
    def addresses(self) -> dict[str, int]:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {name: param.data_ptr() for name, param in model.named_parameters()}


def keep_plain(_: Any, layer: torch.nn.Module) -> None:
    layer.cpu_linear = torch.nn.functional.linear


UnquantizedLinearMethod.process_weights_after_loading = keep_plain
UnquantizedEmbeddingMethod.process_weights_after_loading = keep_plain
