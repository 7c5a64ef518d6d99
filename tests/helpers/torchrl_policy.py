"""A policy as TorchRL's collectors take one."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule


class Policy(TensorDictModule):
    """As TorchRL's wrapper of vLLM: it acts, and holds the engine as `model`."""

    def __init__(self, engine: Any) -> None:
        super().__init__(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
        self.model = engine

    def forward(self, tensordict: Any) -> Any:
        tensordict["action"] = torch.zeros(1)
        return tensordict
