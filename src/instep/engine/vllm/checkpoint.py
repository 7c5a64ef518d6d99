"""The checkpoint from which a vLLM worker has loaded its first weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from instep.errors import PlanError


def loaded_from(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the checkpoint's tensors, read once more by vLLM's own loader. Raises `PlanError`
    if there is no checkpoint or reading fails."""
    from vllm.model_executor.model_loader import get_model_loader

    config = worker.vllm_config
    loader = get_model_loader(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise PlanError(
            f"the engine's first weights are in no checkpoint that can be read: load_format is {config.load_config.load_format}"
        )
    try:
        yield from loader.get_all_weights(config.model_config, worker.model_runner.get_model())
    except Exception as error:
        raise PlanError(f"the checkpoint of the engine's first weights cannot be read: {type(error).__name__}: {error}") from error
