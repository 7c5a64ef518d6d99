"""Gives vLLM's workers instep's calls without `worker_extension_cls`: where `INSTEP_ATTACH=1` asks
for it, and where the worker runs in this process.

A framework that starts vLLM by itself may have no setting for an extension, or one of its own in
that place. Each worker object gets the calls, when it is made or later. No class of vLLM is changed
but for its `__init__`, so vLLM's check for names that an extension has too finds nothing.

An extension that `instep.integrations` knows gives its place to instep's, which has its methods.
"""

from __future__ import annotations

import pkgutil
from functools import wraps
from types import MethodType
from typing import Any

from instep.engine.vllm.config import EXTENSION

CALLS = ("instep_call", "instep_status")


def attach_to_workers() -> None:
    """Has every worker that this process makes answer instep's calls. May be repeated."""
    from vllm.v1.worker import worker_base

    make: Any = worker_base.WorkerBase.__init__
    if hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        attach(self)

    worker_base.WorkerBase.__init__ = __init__
    _replace_extensions(worker_base)


def _replace_extensions(worker_base: Any) -> None:
    """Has vLLM find instep's extensions by the names of those that they replace."""
    resolve = worker_base.resolve_obj_by_qualname

    @wraps(resolve)
    def resolve_obj_by_qualname(qualname: str) -> Any:
        known: dict[str, str] = pkgutil.resolve_name("instep.integrations:EXTENSIONS")  # by name: it stands above this file
        return resolve(known.get(qualname, qualname))

    worker_base.resolve_obj_by_qualname = resolve_obj_by_qualname


def attach(worker: Any) -> None:
    """Gives one worker the calls that it lacks."""
    extension = pkgutil.resolve_name(EXTENSION)  # by name, as vLLM does: it stands above this file
    for name in CALLS:
        if not hasattr(worker, name):
            vars(worker)[name] = MethodType(getattr(extension, name), worker)


def attach_here(llm: Any) -> None:
    """Gives the calls to the worker of an `LLM` that runs in this process, as a colocated trainer's
    does. Does nothing for an engine whose workers run in other processes."""
    if (worker := worker_here(llm)) is not None:
        attach(worker)
        parallel = llm.llm_engine.vllm_config.parallel_config
        parallel.worker_extension_cls = parallel.worker_extension_cls or EXTENSION  # for those who ask whether workers answer


def worker_here(llm: Any) -> Any | None:
    """Returns the worker of an `LLM` that runs in this process, or None."""
    executor = getattr(getattr(llm, "llm_engine", None), "model_executor", None)
    return getattr(getattr(executor, "driver_worker", None), "worker", None)
