"""Ray actors for the tests of the drop-in for TorchRL, as TorchRL's page has them: a trainer with a name, and receivers that look it up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from engines import greedy, start
from models import PROMPTS, tiny

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightSyncScheme, get_model_metadata


class Trainer:
    def __init__(self, config: dict[str, Any], model: Any) -> None:
        self.model = model
        self.sender = VLLMWeightSyncScheme(**config).create_sender()
        self.sender.register_model(model)
        self.metadata = get_model_metadata(model)

    def get_model_metadata(self) -> Any:
        return self.metadata

    def init(self, vllm_engine: Any) -> str:
        self.sender.init_all_workers_group(self.metadata, vllm_engine=vllm_engine)
        return "initialized"

    def update_weights(self, seed: int) -> str:
        with torch.no_grad():
            self.model.load_state_dict(tiny("qwen3", seed).state_dict())
        return self.sender.update_weights().version


class Receiver:
    """Of a real vLLM."""

    def __init__(self, config: dict[str, Any], trainer: str = "Trainer") -> None:
        self.config, self.name = config, trainer

    def setup(self, folder: str) -> str:
        self.llm = self.engine(folder)
        self.receiver = VLLMWeightSyncScheme(**self.config).create_receiver(self.llm)
        return "setup_complete"

    def engine(self, folder: str) -> Any:
        return start(Path(folder), worker_extension_cls="faulty.FaultyExtension")

    def init_metadata(self) -> None:
        import ray

        self.metadata = ray.get(ray.get_actor(self.name).get_model_metadata.remote())

    def init(self) -> str:
        self.receiver.init_all_workers_group(self.metadata)
        return "initialized"

    def answer(self, method: str, payload: bytes) -> bytes:
        return self.receiver.answer(method, payload)

    def poll(self) -> bool:
        return self.receiver.poll_and_apply()

    def generate(self) -> Any:
        return greedy(self.llm, PROMPTS)

    def inject(self, point: str, value: Any) -> Any:
        return self.llm.collective_rpc("inject", args=(point, value))


class SlowEngine(MemoryEngine):
    seconds = 0.0

    async def pause(self, caches: Any) -> None:
        await super().pause(caches)
        await asyncio.sleep(self.seconds)


class MemoryReceiver(Receiver):
    """Of an engine that starts at once."""

    def engine(self, folder: str) -> Any:
        return SlowEngine(tiny("qwen3", 1).state_dict())

    def slow_pause(self, seconds: float) -> None:
        self.llm.seconds = seconds

    def paused(self) -> bool:
        return self.llm.paused

    def generate(self) -> Any:
        return self.llm.fingerprint(), self.llm.generate([1, 2, 3], 4)

    def inject(self, point: Any, value: Any) -> Any:
        return self.llm.inject(point, value)
