"""instep's control routes in vLLM's own HTTP server.

`instep serve` puts them in by vLLM's flag `--middleware`, which every version has. In a server that
somebody else starts, the entry point `vllm.endpoint_plugins` does it where `VLLM_PLUGINS` names
`instep` (vLLM 0.26 and later).
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from typing import Any

from instep.engine.remote import server_log
from instep.engine.remote.asgi import App, Receive, Scope, Send
from instep.engine.remote.http_control import PREFIX, Control, Served
from instep.engine.remote.http_token import is_loopback, token_of
from instep.engine.vllm.answers import note_versions
from instep.engine.vllm.config import reaches_workers
from instep.engine.vllm.engine import AsyncVllmEngine
from instep.engine.vllm.experts import TOGETHER, apart
from instep.errors import ConfigError
from instep.metrics import metrics

logger = logging.getLogger("instep")


class VllmControl(Control):
    """An ASGI middleware for the app that vLLM builds."""

    def __init__(self, app: App) -> None:
        super().__init__(app, served_of)
        self.beginning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and (served := served_of(scope)) is not None:
            self.beginning = asyncio.ensure_future(self.begin(served, scope["app"].state.args))
        await super().__call__(scope, receive, send)

    async def begin(self, served: Served, args: Namespace) -> None:
        """Runs when the server starts. A subclass may hold requests back here."""


class EndpointPlugin:
    """The plug-in of vLLM's entry point. It only adds the middleware, which must see requests to
    vLLM's own routes too."""

    name = "instep"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_middleware(VllmControl)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None: ...


def served_of(scope: Scope) -> Served | None:
    """Returns the engine of vLLM's app, the same for every middleware; None for an app without
    an engine."""
    state = scope["app"].state
    if getattr(state, "instep", None) is None and getattr(state, "engine_client", None) is not None:
        state.instep = _served(state.engine_client, state.args)
        if state.instep.closed is not None:
            logger.warning("instep's routes are closed: %s", state.instep.closed)
    served: Served | None = getattr(state, "instep", None)
    return served


def _served(llm: Any, args: Namespace) -> Served:
    server_log.begin(PREFIX)
    served = Served(AsyncVllmEngine(llm), None, metrics=metrics())
    served.tells = note_versions(llm)
    try:
        served.token = token_of()
        served.closed = _against(llm, args, served.token)
    except ConfigError as error:
        served.closed = str(error.args[0])
    return served


def _against(llm: Any, args: Namespace, token: str | None) -> str | None:
    """Why nobody may push through this server, or None."""
    if token is None and not (args.uds or is_loopback(args.host or "")):
        return "the server listens on more than the loopback and has no token: set INSTEP_TOKEN where it starts"
    if (getattr(args, "api_server_count", None) or 1) > 1 or getattr(llm.engine_core, "client_count", 1) > 1:
        return "the engine has several API servers, and each would know only its own part: start it with --api-server-count 1"
    if not reaches_workers(llm.vllm_config):
        return "this vLLM was started without instep's worker extension: start it with `instep serve`"
    why = apart(llm.vllm_config, llm.engine_core)
    return f"{why}: {TOGETHER}" if why else None
