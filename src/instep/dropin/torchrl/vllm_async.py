"""TorchRL's `AsyncVLLM`, whose actors updates can reach.

    engine = AsyncVLLM.launch(AsyncEngineArgs(model=path), num_replicas=2)
    sender.init_all_workers_group(metadata, vllm_engine=engine)

Needs TorchRL, Ray and vLLM.
"""

from __future__ import annotations

from typing import Any

import msgspec

from instep.dropin.torchrl.receiver import JOIN, Joining
from instep.engine import connect
from instep.engine.rpc import Endpoint, outcome
from instep.engine.vllm import EXTENSION
from instep.errors import ConfigError
from instep.extras import needed_by

with needed_by("TorchRL's AsyncVLLM"):
    from torchrl.modules.llm.backends.vllm import vllm_async


class EngineActor(vllm_async._AsyncLLMEngine):  # type: ignore[misc]
    """One replica."""

    def __init__(self, *, engine_args: Any, **settings: Any) -> None:
        engine_args.worker_extension_cls = engine_args.worker_extension_cls or EXTENSION
        super().__init__(engine_args=engine_args, **settings)
        self._endpoint = Endpoint(connect(self.engine))

    async def answer(self, method: str, payload: bytes) -> bytes:
        """One request of the trainer, on the event loop that the engine lives on."""
        if method == JOIN:
            return await outcome(self._join(payload))
        return await self._endpoint.answer(method, payload)

    async def _join(self, payload: bytes) -> bool:
        """Nobody told this side of the model: there is nothing to compare."""
        _, self._endpoint.timeout = msgspec.msgpack.decode(payload, type=Joining)
        return True


class AsyncVLLM(vllm_async.AsyncVLLM):  # type: ignore[misc]
    """TorchRL's class with `EngineActor`s as replicas, unless another `actor_class` is given. Everything else is TorchRL's own.

    Started by `launch`; `from_pretrained` raises `ConfigError`.
    """

    def __init__(self, engine_args: Any, num_replicas: int = 1, actor_class: Any = None, enable_prefix_caching: bool | None = None) -> None:
        with needed_by("TorchRL's AsyncVLLM"):
            import ray

        actor_class = actor_class or ray.remote(num_cpus=0, num_gpus=0)(EngineActor)
        super().__init__(engine_args, num_replicas, actor_class, enable_prefix_caching)

    # TorchRL's vLLMWrapper takes a class by its name and module, and no subclass of its own.
    __module__ = vllm_async.__name__

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Any:
        raise ConfigError("TorchRL's from_pretrained starts actors of its own", next_step="AsyncVLLM.launch(AsyncEngineArgs(model=...))")
