"""Reads from a vLLM's configuration how its workers know instep."""

from __future__ import annotations

import os
from typing import Any

NAME = "instep"
"""The backend of vLLM's weight transfer."""
EXTENSION = "instep.vllm.WorkerExtension"
ATTACH = "INSTEP_ATTACH"
"""The variable that has every worker answer without an extension (see `attach.py`)."""


def reaches_workers(config: Any) -> bool:
    """Whether the workers of a vLLM with this configuration answer instep's calls."""
    return bool(config.parallel_config.worker_extension_cls) or chosen(config) or attaches()


def attaches() -> bool:
    """Whether workers that this process starts get instep's calls."""
    return os.environ.get(ATTACH, "") not in ("", "0")


def chosen(vllm_config: Any) -> bool:
    """Whether an engine was started with the backend `instep`. Its workers then answer without a
    worker extension."""
    config = getattr(vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend == NAME
