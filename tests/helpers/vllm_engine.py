"""A vLLM whose workers hold small models, in the shapes of several versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.toys import attention
from helpers.vllm_stub import Executor, Worker
from instep.engine.memory import MemoryEngine
from instep.engine.memory_host import MemoryHost
from instep.engine.vllm import plugin as vllm_plugin
from instep.engine.vllm.publisher import WeightPublisher
from instep.receiver.state import Receiver

VERSIONS = [(0, 25), (0, 26), (0, 28), (0, 32)]


class Engine:
    """vLLM's four phases over stub workers, each with a `MemoryHost`."""

    def __init__(self, vllm: Any, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
        vllm_plugin.register()
        self.hosts = [MemoryHost(attention(0), rank, tp) for rank in range(tp)]
        for host in self.hosts:
            with host.reload():
                host.load(attention(0).items())
        self.workers = [Worker(host.rank, tp, host.model) for host in self.hosts]
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        for worker, host in zip(self.workers, self.hosts, strict=True):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=host.rank: rank)
            worker.__dict__["instep_receiver"] = Receiver(host)
            worker.load_model(vllm.WeightTransferEngineFactory)
        self.executor = Executor(self.workers)
        self.call = self.executor.call

    def serves(self, seed: int) -> bool:
        wanted = MemoryEngine(attention(seed), tp=len(self.hosts))
        return [host.fingerprint() for host in self.hosts] == [host.fingerprint() for host in wanted.hosts]

    def update(self, publisher: WeightPublisher, version: str) -> None:
        self.call("start_weight_update")
        self.call("update_weights", publisher.update_info(version))
        self.call("finish_weight_update")

    def states(self) -> list[str]:
        """Also shows that no worker is a reply behind: it would answer for another method."""
        found = self.call("instep_status")
        assert [status["rank"] for status in found] == list(range(len(self.workers)))
        return [status["state"] for status in found]
