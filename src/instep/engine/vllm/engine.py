"""vLLM as an engine, seen from the trainer: an `LLM` or an `AsyncLLM` of this process, built with
one of

worker_extension_cls="instep.vllm.WorkerExtension"
weight_transfer_config={"backend": "instep"}
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from instep.engine import CachePolicy, Engine
from instep.engine.vllm.attach import attach_here, worker_here
from instep.engine.vllm.config import ATTACH, EXTENSION, reaches_workers
from instep.engine.vllm.experts import TOGETHER, apart
from instep.engine.vllm.plugin import commits
from instep.engine.vllm.replicas import call_workers
from instep.errors import ConfigError, EngineDirty, EngineLost
from instep.protocol import Method

T = TypeVar("T")
ENTRANCES = ("generate", "chat", "beam_search", "enqueue", "encode", "embed", "classify", "score")
"""Methods of `LLM` and `AsyncLLM` that run the model."""


def adapt(obj: Any) -> Engine | None:
    """Returns an engine for an `LLM` or an `AsyncLLM`; None for another object. Raises
    `ConfigError` if its workers do not know instep."""
    if not type(obj).__module__.startswith("vllm."):
        return None
    config = getattr(obj, "vllm_config", None) or getattr(getattr(obj, "llm_engine", None), "vllm_config", None)
    if config is None or not hasattr(obj, "collective_rpc"):
        return None
    attach_here(obj)
    if not reaches_workers(config):
        raise ConfigError(
            "this vLLM was started without instep's worker extension",
            next_step=f'start it with worker_extension_cls="{EXTENSION}"; where a framework starts it, set {ATTACH}=1 before',
        )
    asynchronous = asyncio.iscoroutinefunction(obj.collective_rpc)
    if why := apart(config, obj.engine_core if asynchronous else obj.llm_engine.engine_core):
        raise ConfigError(why, next_step=TOGETHER)
    return AsyncVllmEngine(obj) if asynchronous else VllmEngine(obj)


class VllmEngine:
    """A `vllm.LLM` as an engine. Its calls block, so they run in a thread of their own, which is
    left behind when a deadline passes."""

    def __init__(self, llm: Any, name: str = "vllm") -> None:
        self.llm = llm
        self.name = name
        self.thread = _Thread(name, getattr(worker_here(llm), "device", None))
        self.at_once = commits(llm.llm_engine.vllm_config)

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return await self.thread.run(lambda: self.llm.collective_rpc("instep_call", args=(method, payload)))

    async def pause(self, caches: CachePolicy) -> None:
        await self.thread.run(lambda: self._pause(reset=caches == "reset"))

    async def resume(self) -> None:
        await self.thread.run(lambda: self._utility("resume_scheduler"))

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """See `fused_commit.FusedCommit`."""
        return await self.thread.run(lambda: self._commit(payload, version, reset=caches == "reset")) if self.at_once else None

    async def label(self, version: str) -> None:
        if hasattr(self.llm.llm_engine, "set_weight_version"):  # vLLM 0.27 and later
            await self.thread.run(lambda: self.llm.llm_engine.set_weight_version(version))

    async def score(self, token_ids: list[int]) -> list[float]:
        outputs = await self.thread.run(lambda: self.llm.generate([_prompt(token_ids)], _scoring(), use_tqdm=False))
        return _prompt_logprobs(outputs[0], token_ids)

    async def refuse(self, reason: str | None) -> None:
        guard(self.llm, self.name, reason)

    def _pause(self, *, reset: bool) -> None:
        self._forget(reset)
        self._utility("pause_scheduler", "keep", reset)

    def _commit(self, payload: bytes, version: str, *, reset: bool) -> list[bytes]:
        self._forget(reset)
        answers: list[bytes] = self._utility("instep_commit", payload, reset, version)
        return answers

    def _forget(self, reset: bool) -> None:
        if reset and hasattr(self.llm.llm_engine, "renderer"):  # its cache says what the engine, which forgets it now, has seen
            self.llm.llm_engine.renderer.clear_mm_cache()

    def _utility(self, method: str, *args: Any) -> Any:
        core = self.llm.llm_engine.engine_core
        return core.call_utility(method, *args) if hasattr(core, "call_utility") else getattr(core.engine_core, method)(*args)


class AsyncVllmEngine:
    """An `AsyncLLM` as an engine. Its calls run on the `AsyncLLM`'s own event loop, whichever
    loop the push runs on."""

    def __init__(self, llm: Any, name: str = "vllm") -> None:
        self.llm = llm
        self.name = name
        self.at_once = commits(llm.vllm_config)

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return await self._on_its_loop(call_workers(self.llm, method, payload))

    async def pause(self, caches: CachePolicy) -> None:
        await self._on_its_loop(self._pause(reset=caches == "reset"))

    async def resume(self) -> None:
        await self._on_its_loop(self.llm.resume_generation())

    async def commit_at_once(self, payload: bytes, caches: CachePolicy, version: str) -> list[bytes] | None:
        """See `fused_commit.FusedCommit`."""
        return await self._on_its_loop(self._commit(payload, version, reset=caches == "reset")) if self.at_once else None

    async def label(self, version: str) -> None:
        if hasattr(self.llm, "update_weight_version"):  # vLLM 0.27 and later
            await self._on_its_loop(self.llm.update_weight_version(version))

    async def score(self, token_ids: list[int]) -> list[float]:
        async def last() -> Any:
            request = f"instep-canary-{uuid.uuid4().hex}"
            return [output async for output in self.llm.generate(_prompt(token_ids), _scoring(), request)][-1]

        return _prompt_logprobs(await self._on_its_loop(last()), token_ids)

    async def refuse(self, reason: str | None) -> None:
        guard(self.llm, self.name, reason)
        if reason is not None:
            await self._on_its_loop(self.llm.pause_generation(mode="abort", clear_cache=True))

    async def _pause(self, *, reset: bool) -> None:
        """Pauses without the 20 ms for which `pause_generation` sleeps at its end. It waits
        there until the outputs of the last step have reached their callers; these outputs have
        their version in them."""
        if not hasattr(self.llm.engine_core, "pause_scheduler_async"):  # where the front end pauses, in old versions of vLLM
            await self.llm.pause_generation(mode="keep", clear_cache=reset)
            return
        await self._forget(reset)
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=reset)

    async def _commit(self, payload: bytes, version: str, *, reset: bool) -> list[bytes]:
        await self._forget(reset)
        answers: list[bytes] = await self.llm.engine_core.call_utility_async("instep_commit", payload, reset, version)
        return answers

    async def _forget(self, reset: bool) -> None:
        if reset:
            await self.llm.renderer.clear_mm_cache_async()

    async def _on_its_loop(self, call: Coroutine[Any, Any, T]) -> T:
        handler = self.llm.output_handler  # the task that vLLM starts on the loop of its first caller
        loop = handler.get_loop() if handler is not None and not handler.done() else None
        try:
            if loop is None or loop is asyncio.get_running_loop():
                return await call
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))
        except Exception as error:
            raise _lost(self.name, error) from error


def guard(llm: Any, name: str, reason: str | None) -> None:
    """Replaces the methods of this one object that run the model with ones that raise, or
    removes those again."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineDirty(f"{name} refuses to generate: {reason}")

    for entrance in ENTRANCES:
        if reason is None:
            llm.__dict__.pop(entrance, None)
        elif hasattr(type(llm), entrance):
            llm.__dict__[entrance] = refuse


def _prompt(token_ids: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": token_ids}


def _scoring() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)


def _prompt_logprobs(output: Any, token_ids: list[int]) -> list[float]:
    return [float(entry[token].logprob) for entry, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]


def _lost(name: str, error: Exception) -> Exception:
    """Returns vLLM's own error, or an `EngineLost` if a process is gone."""
    if type(error).__name__ in ("EngineDeadError", "CancelledError", "BrokenPipeError") or "died" in str(error):
        return EngineLost(f"{name} lost a process: {type(error).__name__}: {error}")
    return error


Job = tuple[Callable[[], Any], Future[Any]]


class _Thread:
    """Runs blocking calls one after the other. A call that never returns does not keep the
    interpreter from ending.

    The thread ends when this object is gone, and keeps nothing of a call that is over. device: that
    of a worker whose code it runs.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self.jobs, device), name=f"instep-{name}", daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)

    async def run(self, job: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self.jobs.put((job, future))
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:
            raise _lost(self.name, error) from error


def _work(jobs: queue.SimpleQueue[Job | None], device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # every thread begins with the first GPU
    while (job := jobs.get()) is not None:
        _do(*job)
        del job  # which holds the engine until the next one comes


def _do(job: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
