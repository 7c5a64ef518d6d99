"""Workers of a vLLM that a framework starts get instep's calls, where a variable asks for it."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from instep.engine.vllm import attach, plugin
from instep.engine.vllm.config import ATTACH, EXTENSION, reaches_workers
from instep.engine.vllm.engine import VllmEngine
from instep.engine.vllm.worker import WorkerExtension

CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=""))


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """vLLM's `WorkerBase`, in a module of its name."""

    class WorkerBase:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    module: Any = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase, module.resolve_obj_by_qualname = WorkerBase, lambda name: f"what {name} names"
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return WorkerBase


def test_every_worker_answers_where_the_variable_asks_for_it(base: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTACH, "1")
    plugin.register()
    plugin.register()  # vLLM loads plug-ins more than once in a process
    worker = type("CPUWorker", (base,), {})(3)
    assert worker.rank == 3
    assert [getattr(worker, name).__self__ for name in attach.CALLS] == [worker] * 2
    assert not any(hasattr(type(worker), name) for name in attach.CALLS), "vLLM refuses an extension whose names its class has"
    assert reaches_workers(CONFIG)


@pytest.mark.usefixtures("base")
def test_extensions_of_other_projects_give_their_place_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTACH, "1")
    plugin.register()
    resolve = sys.modules["vllm.v1.worker.worker_base"].resolve_obj_by_qualname
    assert resolve("openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap") == "what instep.integrations.openrlhf.WorkerWrap names"
    assert resolve("their.Extension") == "what their.Extension names"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_attached_otherwise(base: type[Any], monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(ATTACH, raising=False)
    if value is not None:
        monkeypatch.setenv(ATTACH, value)
    plugin.register()
    assert not any(hasattr(base(0), name) for name in attach.CALLS)
    assert not reaches_workers(CONFIG)


def test_an_extension_of_ours_keeps_its_own_calls(base: type[Any]) -> None:
    class Ours(WorkerExtension):
        def instep_status(self) -> dict[str, Any]:
            return {"rank": 7}

    worker = type("CPUWorker", (base, Ours), {})(0)
    attach.attach(worker)
    assert worker.instep_status() == {"rank": 7}
    assert "instep_call" not in vars(worker)


def colocated(worker: Any, extension: str = "") -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, model_executor=executor))


@pytest.mark.parametrize("extension", ["", "theirs.Extension"])
def test_a_worker_of_this_process_gets_the_calls_later(monkeypatch: pytest.MonkeyPatch, extension: str) -> None:
    monkeypatch.delenv(ATTACH, raising=False)
    llm = colocated(worker := SimpleNamespace(), extension)
    attach.attach_here(llm)
    assert [getattr(worker, name).__self__ for name in attach.CALLS] == [worker] * 2
    assert reaches_workers(llm.llm_engine.vllm_config)
    assert llm.llm_engine.vllm_config.parallel_config.worker_extension_cls == (extension or EXTENSION)


def test_workers_of_other_processes_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTACH, raising=False)
    llm = colocated(None)
    attach.attach_here(llm)
    assert not reaches_workers(llm.llm_engine.vllm_config)


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_a_worker_of_this_process_runs_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[Any]) -> None:
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    llm = colocated(SimpleNamespace(device=torch.device(device)))
    llm.llm_engine.vllm_config.parallel_config.data_parallel_size = 1
    llm.collective_rpc = lambda *_, **__: list(vars(current).values())
    assert asyncio.run(VllmEngine(llm).call("status", b"")) == chosen
