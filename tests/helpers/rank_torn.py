"""A rank writes to its weights in the middle of a push, as no counter of PyTorch sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from helpers.rank_failures import attempt, begun
from helpers.source_models import saved
from instep.engine.memory import MemoryEngine
from instep.plan.region import view
from instep.ranks.ipc import SharedIpc, Sharing
from instep.ranks.run import Run
from instep.ranks.standing import Standing

RANK = int(os.environ["RANK"])


def before_the_second_read(write: Callable[[], None]) -> Callable[[], None]:
    """Has `write` called once, when this rank has been read once and not twice. Returns what takes that back."""
    places = [(Standing, "check"), (Run, "compare"), (Sharing, "sums"), (SharedIpc, "_summed")]
    real = [getattr(where, name) for where, name in places]
    written: list[bool] = []

    def once() -> None:
        if not written:
            written.append(True)
            write()

    def first(action: Any) -> Any:
        def called(*arguments: Any) -> Any:
            once()
            return action(*arguments)

        return called

    def then(action: Any) -> Any:
        """Over CUDA IPC sums are the first read, and workers read afterwards."""

        def called(*arguments: Any) -> Any:
            result = action(*arguments)
            once()
            return result

        return called

    for (where, name), action in zip(places, real, strict=True):
        setattr(where, name, (then if name in ("sums", "_summed") else first)(action))

    def back() -> None:
        for (where, name), action in zip(places, real, strict=True):
            setattr(where, name, action)

    return back


def torn(way: str, model: str, rank: str) -> dict[str, Any]:
    trainer, engine, sync = begun(way, model=model)
    sync.push("v0")
    role: Any = sync._role
    module = role.source.module if RANK == 0 else role.module
    given = [*role.source.runs[False].given[0], *role.source.runs[True].given[0]] if RANK == 0 else [*role.given[0], *role.given[1]]

    def write() -> None:
        view(module.memory(given[0].live), given[0].rows.read).view(torch.int16).numpy()[...] ^= 1

    back = before_the_second_read(write) if int(rank) == RANK else lambda: None
    found = attempt(lambda: sync.push("torn"))
    back()
    served, refused = (engine.version, engine.refusal) if engine else (None, None)
    after = attempt(lambda: sync.push("after"))["error"]
    sync.close()
    wanted = MemoryEngine(saved(trainer.gathered())) if RANK == 0 else trainer.gathered()
    same = engine is None or engine.fingerprint() == wanted.fingerprint()
    return {**found, "served": served, "refused": refused, "after": after, "same": same}


TORN: dict[str, Callable[..., dict[str, Any]]] = {"torn": torn}
