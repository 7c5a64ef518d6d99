"""What instep asks of vLLM's layers it asks as vLLM does while it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from instep.engine.vllm.worker import VllmHost


class Tied(nn.Module):
    """Two layers with one tensor, as an embedding and its head."""

    def __init__(self, process: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Module(), nn.Module()
        weight = nn.Parameter(torch.zeros(2, 2))
        layer: Any
        for layer in (self.embedding, self.head):
            layer.register_parameter("weight", weight)
            layer.quant_method = SimpleNamespace(process_weights_after_loading=process)


def test_hooks_after_loading_run_within_vllms_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within, seen = [False], list[tuple[str, bool]]()

    @contextmanager
    def context(_: Any) -> Iterator[None]:
        within[0] = True
        yield
        within[0] = False

    def process(layer: nn.Module) -> None:
        seen.append(("head" if layer is model.head else "embedding", within[0]))

    model = Tied(process)
    host: Any = VllmHost.__new__(VllmHost)
    host.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    monkeypatch.setattr(VllmHost, "_context", context)
    host.refresh()
    assert seen == [("head", True)]


def test_the_bias_of_a_padded_head_must_be_filled() -> None:
    head: Any = nn.Module()
    head.weight, head.bias = nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.zeros(8))
    head.shard_indices = SimpleNamespace(num_org_elements=5, num_added_elements=0)
    head.num_embeddings_per_partition, head.embedding_dim = 8, 6
    model = nn.Module()
    model.head = head
    host: Any = VllmHost.__new__(VllmHost)
    host.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    assert host.spare("head.weight")[0] == 18
    assert host.spare("head.bias")[0] == 3
