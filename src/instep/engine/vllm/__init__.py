"""vLLM: its engines as they are pushed to (`engine.py`), and what runs within its processes
(`worker.py`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Finds the classes of `engine.py` under their old names."""
    if name in ("AsyncVllmEngine", "VllmEngine"):
        return getattr(import_module("instep.engine.vllm.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
