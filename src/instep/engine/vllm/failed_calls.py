"""Tells workers of calls that failed before they reached them, as a trainer may be waiting for
the workers in a broadcast.

The name of a method is looked at in vLLM's core. There a wrong one is refused once; in several
workers each would refuse it, and vLLM reads one reply.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

TELL = "instep_call_failed"


def watch(core: Any) -> None:
    """Wraps `collective_rpc` in vLLM's classes. core: vLLM's `EngineCore`, or None. May be
    repeated.

    `LLMEngine` and not `LLM`: Ray holds an actor's methods as they were before its first line ran.
    """
    fronts = _found("v1.engine.llm_engine", "LLMEngine"), _found("v1.engine.async_llm", "AsyncLLM")
    for owner, change in ((core, _refusing_names), *((front, _telling) for front in fronts)):
        run = getattr(owner, "collective_rpc", None)
        if run is not None and not hasattr(run, "instep"):
            owner.collective_rpc = wraps(run)(change(run))
            owner.collective_rpc.instep = True


def _refusing_names(run: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method, str) and _hears(self) and not _known(self.vllm_config.parallel_config, method):
            run(self, TELL, args=(f"no worker has a method {method!r}",))
            raise NotImplementedError(f"Method {method!r} is not implemented: no worker has it, and none was called.")
        return run(self, method, *args, **kwargs)

    return collective_rpc


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a front end's `collective_rpc`. A `TypeError` there means that vLLM cannot send the
    arguments."""

    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except TypeError as error:
            with suppress(Exception):
                if _hears(self):
                    run(self, TELL, args=(str(error),))
            raise

    async def collective_rpc_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await run(self, *args, **kwargs)
        except TypeError as error:
            with suppress(Exception):
                if _hears(self):
                    await run(self, TELL, args=(str(error),))
            raise

    return collective_rpc_async if inspect.iscoroutinefunction(run) else collective_rpc


def _found(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"vllm.{module}"), name, None)


def _hears(engine: Any) -> bool:
    """Whether the workers' extension has the method that takes this news."""
    with suppress(Exception):
        return hasattr(_class(engine.vllm_config.parallel_config.worker_extension_cls), TELL)
    return False


def _known(parallel: Any, method: str) -> bool:
    """Whether a worker has this method. True also if that cannot be found out."""
    with suppress(Exception):
        return any(
            hasattr(_class(name), method)
            for name in (parallel.worker_extension_cls, "vllm.v1.worker.worker_base.WorkerWrapperBase", parallel.worker_cls)
        )
    return True


def _class(name: str) -> Any:
    return pkgutil.resolve_name(name)
