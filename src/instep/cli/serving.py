"""Work of `instep serve` after its engine has started and before the server is ready."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from pathlib import Path

from instep import WeightSync
from instep.cli.start_signals import started
from instep.engine.remote.http_control import Served
from instep.engine.remote.rpc import LocalRpc, RemoteEngine
from instep.engine.vllm.routes import VllmControl
from instep.errors import InstepError
from instep.transport.shm.segment import sweep

LOADING = 3600.0
"""Seconds for each phase of a catch-up from a directory."""

logger = logging.getLogger("instep")


class ServeControl(VllmControl):
    """The middleware that `instep serve` gives to vLLM: a `VllmControl` that begins with a
    catch-up if one was asked for."""

    async def begin(self, served: Served, args: Namespace) -> None:
        """Holds requests back until the engine has caught up, if that was asked for."""
        started()
        sweep()
        if args.instep_catch_up == "trainer":
            served.waiting = "no trainer has pushed since it started"
            while served.endpoint.version is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        elif args.instep_catch_up is not None:
            served.waiting = f"it catches up from {args.instep_catch_up}"
            try:
                await _load(served, Path(args.instep_catch_up))
            except InstepError as error:
                served.waiting = f"it could not catch up from {args.instep_catch_up}: {error.args[0]}"
                logger.exception(served.waiting)
                return
        served.waiting = None


async def _load(served: Served, folder: Path) -> None:
    """Loads a checkpoint as a trainer would push it. The version is the directory's name."""
    engine, patience = RemoteEngine(LocalRpc(served.endpoint.answer, served.engine.name)), served.endpoint.timeout
    served.endpoint.timeout = LOADING
    with WeightSync(folder, [engine], cast=True, timeout=LOADING) as sync:
        await sync.apush(folder.name)
    served.endpoint.timeout = patience
