"""TorchRL's `AsyncVLLM`, whose actors updates can reach.

    engine = AsyncVLLM.from_pretrained(path, num_replicas=2)
    sender.init_all_workers_group(metadata, vllm_engine=engine)

Needs TorchRL, Ray and vLLM.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec

from instep.dropin.torchrl.scheme import LocalPush
from instep.dropin.torchrl.weights import JOIN, Joining, open_weights
from instep.engine import connect
from instep.engine.remote.rpc import Endpoint, outcome
from instep.engine.vllm.config import EXTENSION
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
    """TorchRL's class with `EngineActor`s as replicas, unless another `actor_class` is given, and
    with `init_weight_update_group` and `update_weights` over a push. Everything else is TorchRL's
    own."""

    _push: LocalPush | None = None

    def __init__(
        self,
        engine_args: Any,
        num_replicas: int = 1,
        actor_class: Any = None,
        enable_prefix_caching: bool | None = None,
    ) -> None:
        with needed_by("TorchRL's AsyncVLLM"):
            import ray

        actor_class = actor_class or ray.remote(num_cpus=0, num_gpus=0)(EngineActor)
        super().__init__(engine_args, num_replicas, actor_class, enable_prefix_caching)

    # TorchRL's vLLMWrapper takes a class by its name and module, and no subclass of its own.
    __module__ = vllm_async.__name__

    def __reduce__(self) -> Any:
        return _restored, ({name: value for name, value in vars(self).items() if name != "_push"},)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,
        enable_fp32_output: bool = False,
        **kwargs: Any,
    ) -> AsyncVLLM:
        """As `make_async_vllm_engine`."""
        return make_async_vllm_engine(
            model_name=model_name,
            num_devices=num_devices,
            num_replicas=num_replicas,
            verbose=verbose,
            compile=compile,
            enable_fp32_output=enable_fp32_output,
            **kwargs,
        )

    def init_weight_update_group(self) -> None:
        """Readies `update_weights`. No group is made: workers read what a push offers them."""
        if not self._launched:
            raise ConfigError(
                "these engines were not started",
                next_step="AsyncVLLM.from_pretrained, or AsyncVLLM.launch",
            )
        self._leave()
        self._push = LocalPush(self, {"cast": True})

    def update_weights(self, weights: Any) -> None:
        """Brings every replica to these weights, all of the model: pairs of a name and a tensor, a
        mapping, a TensorDict or a module. Raises what `WeightSync.push` raises."""
        if self._push is None:
            raise ConfigError("call init_weight_update_group first")
        self._push.push(open_weights(weights))

    def shutdown(self) -> None:
        self._leave()
        super().shutdown()

    def _leave(self) -> None:
        if self._push is not None:
            self._push.close()
            self._push = None


def _restored(state: dict[str, Any]) -> AsyncVLLM:
    """An `AsyncVLLM` in another process, with the same actors."""
    found = AsyncVLLM.__new__(AsyncVLLM)
    found.__dict__.update(state)
    return found


def make_async_vllm_engine(
    *,
    model_name: str,
    num_devices: int | None = None,
    num_replicas: int = 1,
    verbose: bool = True,
    compile: bool = True,
    enable_fp32_output: bool = False,
    tensor_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    **kwargs: Any,
) -> AsyncVLLM:
    """Starts `num_replicas` engines in Ray actors.

    num_devices: the same as `tensor_parallel_size`, 1 by default.
    verbose: vLLM's loggers at INFO. compile: vLLM's compilation mode 3, else 0.
    enable_fp32_output: TorchRL's plugin computes logits in float32, for the models it knows.
    kwargs: vLLM's `AsyncEngineArgs`; the prefix cache is off unless they say otherwise.
    """
    with needed_by("TorchRL's AsyncVLLM"):
        from vllm import AsyncEngineArgs
    if num_devices and tensor_parallel_size and num_devices != tensor_parallel_size:
        raise ConfigError(f"num_devices={num_devices} and tensor_parallel_size={tensor_parallel_size} are the same thing")
    if enable_fp32_output:
        os.environ.update({"VLLM_ENABLE_FP32_OUTPUT": "1", vllm_async.FP32_OVERRIDES_ENV_VAR: "1"})
    if verbose:
        for logger in ("vllm", "vllm.engine.metrics"):
            logging.getLogger(logger).setLevel(logging.INFO)
    defaults = {
        "enable_prefix_caching": False,
        "compilation_config": vllm_async._compilation_config(3 if compile else 0),
        "worker_extension_cls": EXTENSION,
    }
    arguments = AsyncEngineArgs(
        model=model_name,
        tensor_parallel_size=tensor_parallel_size or num_devices or 1,
        data_parallel_size=data_parallel_size or 1,
        pipeline_parallel_size=pipeline_parallel_size or 1,
        **{**defaults, **kwargs},
    )
    engine: AsyncVLLM = AsyncVLLM.launch(arguments, num_replicas)
    return engine
