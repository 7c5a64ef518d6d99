"""Engines that never answer, without the waiting: a deadline passes as soon as an engine hangs. What happens then is real."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from instep.engine import member, memory

_timeouts: dict[Any, asyncio.Timeout] = {}


def timeout(seconds: float) -> asyncio.Timeout:
    """Stands in for `asyncio.timeout`, and remembers the innermost of each task."""
    _timeouts[asyncio.current_task()] = asyncio.timeout(seconds)
    return _timeouts[asyncio.current_task()]


async def hang() -> None:
    """Ends with the deadline of the caller."""
    _timeouts[asyncio.current_task()].reschedule(asyncio.get_running_loop().time())
    await asyncio.sleep(math.inf)


def shorten_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "asyncio", SimpleNamespace(timeout=timeout, sleep=asyncio.sleep))
    stub = SimpleNamespace(sleep=lambda _: hang(), get_running_loop=asyncio.get_running_loop, gather=asyncio.gather)
    monkeypatch.setattr(memory, "asyncio", stub)
