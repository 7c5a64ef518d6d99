"""What vLLM loads at its start, in every process, through the entry point `vllm.general_plugins`.

It makes `instep` a name that `weight_transfer_config` knows. Nothing is imported for it until an engine asks for that name. Where
`VLLM_PLUGINS` is set, `instep` must be in it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

NAME = "instep"


def register() -> None:
    """May be repeated. Never raises, as vLLM would not start; does nothing where weight transfer has other phases (vLLM before 0.25)."""
    try:
        _register()
    except Exception:
        logging.getLogger("instep").warning("vLLM's weight transfer cannot be told of instep; the worker extension works", exc_info=True)


def _register() -> None:
    try:
        from vllm.distributed import weight_transfer
    except ImportError:  # vLLM before 0.16
        return
    if not hasattr(weight_transfer.WeightTransferEngine, "finish_weight_update"):
        return
    with suppress(ValueError):  # it is registered already
        weight_transfer.WeightTransferEngineFactory.register_engine(NAME, "instep.engine.vllm_backend", "InstepEngine")
    if hasattr(weight_transfer, "WeightTransferTrainerFactory"):  # vLLM 0.26 and later
        with suppress(ValueError):
            weight_transfer.WeightTransferTrainerFactory.register_engine(NAME, "instep.engine.vllm_trainer", "InstepTrainer")


def chosen(vllm_config: Any) -> bool:
    """Whether an engine was started with this backend: its workers answer instep then, without a worker extension."""
    config = getattr(vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == NAME
