"""The trainer's side for those who keep vLLM's four phases, with engines on the trainer's host that
were started with

weight_transfer_config={"backend": "instep"}
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import torch
from msgspec import structs

from instep.config import Config, check_version
from instep.engine.vllm.parts import split
from instep.forked import Own
from instep.plan.routes import check_metadata
from instep.protocol import Manifest, TensorMeta, dtype_name, encode
from instep.source import open_source, unchanged
from instep.source.guarded import Guarded
from instep.transport import Placed, at_rest
from instep.transport.shm.publish import ShmTransport


class WeightPublisher:
    """Publishes versions in shared memory, and makes the arguments of vLLM's phases.

        publisher = WeightPublisher(model)
        llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
        for step in range(steps):
            train(model)
            llm.start_weight_update()
            llm.update_weights({"update_info": publisher.update_info(f"step-{step}")})
            llm.finish_weight_update(f"step-{step}")
            llm.reset_prefix_cache()

    One `update_info` serves any number of engines. With `AsyncLLM` and over HTTP: pause before
    `start`, resume after `finish`. `WeightSync` does all this, heals what can be healed, and needs
    no phases.

    source: as for `WeightSync`.
    dtype: tensors of floating-point numbers are rounded to it. Without it nothing may be rounded:
        the engine stores the source's dtypes or wider ones.
    timeout: seconds that an engine's workers wait for each other, and for the proof of the bytes.
    """

    def __init__(self, source: Any, *, dtype: torch.dtype | None = None, timeout: float = Config().timeout) -> None:
        self._config, self._own = Config(timeout=timeout), Own()
        self._source = open_source(source)
        self._dtype = dtype
        self._transport = ShmTransport()
        self._in_use = False

    def init_info(self) -> dict[str, Any]:
        """Returns the arguments of `init_weight_transfer_engine`, in plain JSON types."""
        return {"timeout": self._config.timeout}

    def update_info(self, version: str, *, base: str | None = None) -> dict[str, Any]:
        """Returns the arguments of `update_weights`, in plain JSON types, for the source's
        weights of this moment. They are copied before this returns.

        The version published before can be opened no more; an engine that has staged it keeps it.

        base: engines refuse unless they serve this version.

        Raises `ConfigError`, `SourceError`, `PlanError`, `TransportError`: nothing was published.
        """
        return _info(self._published(version, base))

    def update_infos(self, version: str, parts: int, *, base: str | None = None) -> list[dict[str, Any]]:
        """Returns arguments like those of `update_info`, for `parts` calls of `update_weights`
        between `start` and `finish`, in any order.

        Engines take all or nothing.

        Raises `ConfigError` for more parts than tensors, too.
        """
        found = split(self._published(version, base), parts)
        return [{**_info(one), "part": number, "parts": parts} for number, one in enumerate(found, 1)]

    def _published(self, version: str, base: str | None) -> Manifest:
        check_version(version)
        self._own.check("WeightPublisher")
        source = Guarded(self._source)
        tensors = [self._sent(meta) for meta in source.metadata()]
        check_metadata(tensors)
        if self._in_use:  # by an engine that has not finished: memory of its own for the next version
            self._transport.close()
            self._transport = ShmTransport()
        self._in_use = True
        with unchanged(source):
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                at_rest(torch.device("cuda"))
            published = self._transport.publish(tensors, Placed(source.tensors, source.again, source.stays))
        return Manifest(version, base, tensors, published.digests, published.location, source.merged)

    def finished(self) -> None:
        """Tells that every engine that was given the last `update_info` has finished. The next
        version then uses the same memory, which is faster than new pages. This call is optional."""
        self._transport.release_all_but(set())
        self._in_use = False

    def close(self) -> None:
        """Frees the shared memory. Engines go on serving what they serve."""
        self._transport.close()

    def _sent(self, meta: TensorMeta) -> TensorMeta:
        floating = getattr(torch, meta.dtype).is_floating_point
        return structs.replace(meta, dtype=dtype_name(self._dtype)) if self._dtype is not None and floating else meta


def _info(manifest: Manifest) -> dict[str, Any]:
    return {"manifest": b64encode(encode(manifest)).decode()}
