"""instep among vLLM's own trainer engines: for code that is written to vLLM's
`WeightTransferTrainerFactory`.

trainer = WeightTransferTrainerFactory.trainer_init(
    InstepTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"), source=ModuleSource(model)
)
trainer.send_weights()
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from instep.config import Config
from instep.engine.vllm.config import NAME
from instep.engine.vllm.publisher import WeightPublisher
from instep.errors import ConfigError
from instep.extras import needed_by
from instep.protocol import TensorMeta, dtype_name

with needed_by("vLLM's trainer engine"):
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightSource,
    )


@dataclass
class InstepTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Arguments of a trainer engine. dtype, timeout: as for `WeightPublisher`."""

    backend: ClassVar[str] = NAME
    dtype: torch.dtype | None = None
    timeout: float = Config().timeout


class InstepTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]
    """vLLM's trainer engine, called on every rank. Rank 0 publishes and talks to the engine, the
    others take part in gathering the weights."""

    init_info_cls = InstepTrainerInitInfo

    def __init__(self, init_info: InstepTrainerInitInfo, client: Any, source: WeightSource) -> None:
        self.is_sender, self.client, self.source = init_info.is_sender, client, source
        self.run, self.sent = uuid.uuid4().hex[:8], 0
        if self.is_sender:
            self.publisher = WeightPublisher(VllmSource(source), dtype=init_info.dtype, timeout=init_info.timeout)

    @classmethod
    def trainer_init(cls, init_info: InstepTrainerInitInfo, *, client: Any, source: Any = None, config: Any = None) -> InstepTrainer:  # noqa: ARG003
        """Makes a trainer engine. `config` exists in vLLM 0.26 and 0.27 alone."""
        if not isinstance(source, WeightSource):
            raise ConfigError(f"vLLM's trainer engines take a WeightSource, not {type(source).__name__}")
        trainer = cls(init_info, client, source)
        if trainer.is_sender:
            client.init_weight_transfer_engine(trainer.publisher.init_info())
        return trainer

    def send_weights(self, version: str | None = None) -> None:
        """Makes one update, from start to finish. If no label is given, it is this run's name
        and a number.

        Where the client's engine reports an error, it serves what it served, or the error says that
        it is dirty.
        """
        self.sent += 1
        version = version or f"{self.run}-{self.sent}"
        if not self.is_sender:
            self.source.metadata()
            for _read in range(2):  # as the sender reads it: all ranks take part in gathering
                for _ in self.source:
                    pass
            return
        update_info = self.publisher.update_info(version)
        self.client.start_weight_update()
        self.client.update_weights(update_info)
        labels = inspect.signature(self.client.finish_weight_update).parameters  # none before vLLM 0.27
        self.client.finish_weight_update(*([version] if labels else []))
        self.publisher.finished()

    def shutdown(self) -> None:
        if self.is_sender:
            self.publisher.close()


class VllmSource:
    """vLLM's `WeightSource` as a source of instep. It cannot tell when its tensors change."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(meta.name, dtype_name(meta.dtype), tuple(meta.shape)) for meta in self._source.metadata()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._source

    def stamp(self) -> Hashable:
        return None

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None
