"""A worker extension for tests in which vLLM's reload can be told to go wrong, in ways in which it does or might."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

from instep.engine.vllm import host
from instep.engine.vllm.worker import WorkerExtension, receiver_for
from instep.receiver.kept import Kept


class WrongReloadExtension(WorkerExtension):
    """`go_wrong(how)`: from now on, until `go_wrong("")`. What earlier pushes have proved is forgotten. beforehand: whether layers may be
    decided without a session."""

    def go_wrong(self, how: str, beforehand: bool) -> None:
        receiver: Any = receiver_for(self)
        receiver.kept, receiver.host.decides_beforehand = Kept(), beforehand
        for one in vars(self).pop("patches", []):
            one.stop()
        vars(self)["patches"] = patches = WAYS[how](self.model_runner.get_model()) if how else []  # type: ignore[attr-defined]
        for one in patches:
            one.start()


def experts_stay_unpacked(_: nn.Module) -> list[Any]:
    """As vLLM leaves them, without what instep repairs."""
    return [patch.object(host, "forget_expert_kernels", lambda model: None)]


def tied_head_stays(_: nn.Module) -> list[Any]:
    """As vLLM leaves it, without what instep repairs."""
    return [patch.object(host, "refresh_tied", lambda model: None)]


def packed_weights_stay(model: nn.Module) -> list[Any]:
    """One layer goes on computing with what was packed before."""
    layer: Any = model.get_submodule("model.layers.1.self_attn.o_proj")
    kept = layer.cpu_linear
    return [_after(lambda processed: setattr(layer, "cpu_linear", kept) if processed is layer else None)]


def _after(change: Callable[[nn.Module], object]) -> Any:
    process = layerwise._layerwise_process

    def processed(layer: nn.Module, info: Any) -> None:
        process(layer, info)
        with torch.no_grad():
            change(layer)

    return patch.object(layerwise, "_layerwise_process", processed)


WAYS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "experts": experts_stay_unpacked,
    "tied-head": tied_head_stays,
    "packed": packed_weights_stay,
}
