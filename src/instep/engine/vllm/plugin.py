"""The plug-in that vLLM loads at its start, in every process, through the entry point
`vllm.general_plugins`.

It makes `instep` a name that `weight_transfer_config` knows, gives vLLM's `EngineCore` the utility
call `instep_commit` (see `core.py`), has calls of workers carry dtypes, and tells workers of calls
that do not come to them (see `failed_calls.py`). Nothing is imported for these until it is asked
for. Where `VLLM_PLUGINS` is set, `instep` must be in it.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any

from instep.engine.vllm import attach, failed_calls
from instep.engine.vllm.config import NAME, attaches


def register() -> None:
    """Registers instep with vLLM. May be repeated. Never raises, as vLLM would not start. Does
    nothing if weight transfer has other phases (vLLM before 0.25)."""
    try:
        if attaches():
            attach.attach_to_workers()
        _add_commit()
        _name_dtypes()
        failed_calls.watch(_core())
        _register()
    except Exception:
        logging.getLogger("instep").warning("vLLM's weight transfer cannot be told of instep; the worker extension works", exc_info=True)


def _add_commit() -> None:
    """Adds `instep_commit` to vLLM's core. If the core is not imported yet, engines started from
    here make a call for each step of a commit."""
    core = _core()
    messages = getattr(sys.modules.get("vllm.v1.engine"), "EngineCoreRequestType", None)
    if hasattr(core, "pause_scheduler") and hasattr(messages, "WAKEUP"):  # before that the front end paused
        core.instep_commit = _commit
        if hasattr(core, "set_weight_version"):  # vLLM 0.27 and later
            _watch(core, "collective_rpc")
            _watch(core, "sleep")


def _name_dtypes() -> None:
    """Makes vLLM's calls of its workers carry a `torch.dtype` as its name, if they cannot carry
    it otherwise."""
    encoder: Any = getattr(sys.modules.get("vllm.v1.serial_utils"), "MsgpackEncoder", None)
    run = getattr(encoder, "enc_hook", None)
    if run is None or hasattr(run, "__wrapped__"):
        return

    @wraps(run)
    def enc_hook(self: Any, obj: Any) -> Any:
        try:
            return run(self, obj)
        except TypeError:
            if not isinstance(obj, sys.modules["torch"].dtype):
                raise
            return str(obj)

    encoder.enc_hook = enc_hook


def _watch(core: Any, name: str) -> None:
    """Makes vLLM's core check, after each call of its workers that is no push, whether its
    weights are still those of its label."""
    run = getattr(core, name)
    if hasattr(run, "__wrapped__"):
        return

    @wraps(run)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = run(self, *args, **kwargs)
        finally:
            if args[:1] != ("instep_call",):
                _relabel(self)
        if isinstance(result, Future):  # a step is finished first
            result.add_done_callback(lambda _: _relabel(self))
        return result

    setattr(core, name, call)


def _relabel(core: Any) -> None:
    with suppress(Exception):  # vLLM's own answer is what its caller wants
        from instep.engine.vllm.core import relabel

        relabel(core)


def _commit(self: Any, payload: bytes, reset: bool, version: str) -> Any:  # vLLM looks at the parameters
    from instep.engine.vllm.core import commit

    return commit(self, payload, reset, version)


def _core() -> Any:
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


def commits(vllm_config: Any) -> bool:
    """Whether an engine that was started from this process with this configuration has
    `instep_commit`. Replicas agree on a pause among themselves, so they commit step by step."""
    return hasattr(_core(), "instep_commit") and vllm_config.parallel_config.data_parallel_size == 1


def _register() -> None:
    try:
        from vllm.distributed import weight_transfer
    except ImportError:  # vLLM before 0.16
        return
    if not hasattr(weight_transfer.WeightTransferEngine, "finish_weight_update"):
        return
    with suppress(ValueError):  # it is registered already
        weight_transfer.WeightTransferEngineFactory.register_engine(NAME, "instep.engine.vllm.backend", "InstepEngine")
    if hasattr(weight_transfer, "WeightTransferTrainerFactory"):  # vLLM 0.26 and later
        with suppress(ValueError):
            weight_transfer.WeightTransferTrainerFactory.register_engine(NAME, "instep.engine.vllm.trainer", "InstepTrainer")
