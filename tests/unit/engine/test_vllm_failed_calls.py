"""Calls of workers that do not come to them: the workers are told, and a wrong name is refused once."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instep.engine.vllm import failed_calls

OURS = "instep.dropin.vllm_rlhf.WorkerExtension"


class Worker:
    def execute_model(self) -> None: ...


def config(extension: str) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension, worker_cls=f"{__name__}.Worker"))


class Engine:
    """As vLLM's core and front ends."""

    def __init__(self, extension: str = OURS) -> None:
        self.vllm_config, self.called = config(extension), list[Any]()

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> str:
        if object in map(type, args):
            raise TypeError("object is not serializable")
        self.called.append((method, *args))
        return "answers"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    base: Any = ModuleType("vllm.v1.worker.worker_base")
    base.WorkerWrapperBase = type("WorkerWrapperBase", (), {"init_device": None})
    parents = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.worker")}
    core = type("EngineCore", (Engine,), {"collective_rpc": Engine.collective_rpc})
    llm = type("LLMEngine", (Engine,), {"collective_rpc": Engine.collective_rpc})

    class AsyncLLM(Engine):
        async def collective_rpc(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
            return super().collective_rpc(*args, **kwargs)

    fronts = {"vllm.v1.engine.llm_engine": SimpleNamespace(LLMEngine=llm), "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=AsyncLLM)}
    for name, module in {**parents, **fronts, base.__name__: base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        failed_calls.watch(core)
    return SimpleNamespace(core=core, llm=llm, asynchronous=AsyncLLM)


@pytest.mark.parametrize("method", ["update_weight", "instep_call", "execute_model", "init_device", print], ids=str)
def test_what_a_worker_has_is_called(vllm: Any, method: Any) -> None:
    core = vllm.core()
    assert core.collective_rpc(method, args=(1,)) == "answers"
    assert core.called == [(method, 1)]


def test_a_name_that_no_worker_has_is_refused_before_they_are_called(vllm: Any) -> None:
    core = vllm.core()
    with pytest.raises(NotImplementedError, match=r"'update_wait' is not implemented: no worker has it"):
        core.collective_rpc("update_wait", args=(1,))
    assert core.called == [("instep_call_failed", "no worker has a method 'update_wait'")]


@pytest.mark.parametrize("extension", ["", "builtins.int", "no.such.module"])
def test_workers_of_others_are_left_alone(vllm: Any, extension: str) -> None:
    core, front = vllm.core(extension), vllm.llm(extension)
    core.collective_rpc("update_wait")
    with pytest.raises(TypeError, match="not serializable"):
        front.collective_rpc("update_weight", args=(object(),))
    assert (core.called, front.called) == ([("update_wait",)], [])


def test_arguments_that_cannot_be_sent_are_told_to_the_workers(vllm: Any) -> None:
    front, other = vllm.llm(), vllm.asynchronous()
    with pytest.raises(TypeError, match="not serializable"):
        front.collective_rpc("update_weight", args=(object(),))
    with pytest.raises(TypeError, match="not serializable"):
        asyncio.run(other.collective_rpc("update_weight", args=(object(),)))
    assert front.called == other.called == [("instep_call_failed", "object is not serializable")]
    assert front.collective_rpc("update_weight", args=(1,)) == asyncio.run(other.collective_rpc("update_weight", args=(1,))) == "answers"
