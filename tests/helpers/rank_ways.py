"""How a trainer of several ranks brings its weights to an engine in memory."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.pretend_cuda import pretend
from instep import WeightSync
from instep.transport.broadcast import publish as broadcast

HTTP: dict[str, dict[str, Any]] = {"http": {"transport": "http"}}
WAYS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "ipc": {"transport": "ipc"},
    "one": {"transport": "gloo"},
    "seven": {"transport": "gloo"},
    "whole": {"transport": "gloo", "gather_whole_model": True},
}
BLOCK = 32 << 10
BUCKETS = {"one": 2 * BLOCK, "seven": 11 * BLOCK}
"""A tiny tensor takes one block. So many of them are in a bucket, beside one block, or four, for what arrives."""


def opened(module: Any, engine: Any, way: str, **settings: Any) -> WeightSync:
    """engine: None on every rank but the first."""
    if way == "ipc":
        pretend(pytest.MonkeyPatch())  # for as long as this process lives
    before = broadcast.SETTINGS["gloo"]
    broadcast.SETTINGS["gloo"] = broadcast.Settings(BUCKETS.get(way, 1 << 20), "prepare", on_gpu=False)
    try:
        return WeightSync(module, [] if engine is None else [engine], **{"timeout": 30.0, **(WAYS | HTTP)[way], **settings})
    finally:
        broadcast.SETTINGS["gloo"] = before
