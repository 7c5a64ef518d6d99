"""A gate between forwards and pushes, for an engine in its trainer's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from instep.errors import EngineDirty
from instep.protocol import Method

CHANGING: tuple[Method, ...] = ("trace", "decide", "commit", "digest")
"""What a worker does to its live tensors, or while nobody may: `trace` and `decide` run without a
pause."""
LOOK = 0.001  # seconds between two looks for forwards that have begun before a pause


class Gate:
    """Lets any number of forwards through, or changes of the weights, never both.

    It is closed by a pause, for everybody but the thread that has paused, which would wait for
    itself, and by each change, for everybody. Forwards within a forward pass.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Why nobody may pass, also when it is open again."""
        self._turn = threading.Condition()
        self._inside = self._changing = 0
        self._paused_by: int | None = None  # the thread
        self._mine = threading.local()  # how deep this thread is in forwards

    @property
    def paused(self) -> bool:
        return self._paused_by is not None

    @property
    def empty(self) -> bool:
        """Whether a pause keeps forwards out, and all that had begun are over."""
        return self.paused and not self._inside

    @contextmanager
    def passing(self, name: str, patience: float) -> Iterator[None]:
        """Lets a forward of the engine `name` through.

        Raises `EngineDirty` where the engine refuses, `RuntimeError` where the gate stays closed
        for `patience` seconds.
        """
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            self._enter(name, patience)
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            if not depth:
                self._count(inside=-1)

    def _enter(self, name: str, patience: float) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self.refusal or self._open(), patience):
                raise RuntimeError(f"{name} was left paused for {patience:g} s")
            if self.refusal:
                raise EngineDirty(f"{name} refuses to generate: {self.refusal}")
            self._inside += 1

    def _open(self) -> bool:
        return not self._changing and self._paused_by in (None, threading.get_ident())

    async def pause(self) -> None:
        """Returns when all forwards that have begun are over."""
        with self._turn:
            self._paused_by = threading.get_ident()
        while self._inside:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)  # they run in other threads

    def resume(self) -> None:
        with self._turn:
            self._paused_by = None
            self._turn.notify_all()

    def refuse(self, reason: str | None) -> None:
        """Turns away forwards, also those that wait. None: forwards may pass again."""
        with self._turn:
            self.refusal = reason
            self._turn.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Guards a change of the weights, in a thread of its own: waits until nobody is inside."""
        self._count(changing=1)
        try:
            with self._turn:
                self._turn.wait_for(lambda: not self._inside)
            yield
        finally:
            self._count(changing=-1)

    def _count(self, inside: int = 0, changing: int = 0) -> None:
        with self._turn:
            self._inside += inside
            self._changing += changing
            self._turn.notify_all()


_gates: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()


def gated(model: nn.Module, gate: Gate, name: str, patience: float) -> None:
    """Makes `model` pass through `gate` in each forward, whoever calls it. A copy of the
    model passes through none."""
    forward = vars(model).get("forward", type(model).forward)  # bound where somebody has put it there

    @wraps(forward)
    def pass_through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = forward if "forward" in own else partial(forward, self)
        if (found := _gates.get(self)) is None:
            return run(*args, **kwargs)
        with found.passing(name, patience):
            return run(*args, **kwargs)

    own = {*vars(model)}
    _gates[model] = gate
    vars(model)["forward"] = MethodType(pass_through, model)
