"""Versions in a directory of two buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from instep.dropin.torchrl.directory import Buffer, buffer, newest, write
from instep.source import open_source


def put(place: Path, weights: Any, version: str) -> None:
    write(place, open_source(weights), version)


def current(place: Path) -> Buffer:
    slot = newest(place)
    assert slot is not None
    return Buffer(buffer(place, slot))


def filled(version: int) -> dict[str, torch.Tensor]:
    """Every element of every tensor says which version it is of."""
    return {f"layer.{index}.weight": torch.full((64, 64), float(version)) for index in range(20)}


def write_until(place: Path, ended: Any) -> None:
    """One version after the other, as fast as it goes. For a process of its own."""
    version = 0
    while not ended.is_set():
        version += 1
        put(place, filled(version), f"v{version}")
