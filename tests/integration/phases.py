"""vLLM's own four phases, as a trainer runs them through `LLM`."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny

from instep.engine.vllm.publisher import WeightPublisher

Weights = dict[str, torch.Tensor]


def update(llm: Any, publisher: WeightPublisher, version: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info(version)})
    llm.finish_weight_update(version)
    llm.reset_prefix_cache()


def takes_over(llm: Any, weights: Weights, family: str) -> WeightPublisher:
    """A new trainer, whose first version the engine serves. Its weights are those of seed 3 by then."""
    publisher = WeightPublisher(weights, timeout=30)
    llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
    update(llm, publisher, f"start-{id(publisher)}")
    weights.update(tiny(family, 3).state_dict())
    return publisher
