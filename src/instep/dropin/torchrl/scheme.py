"""What both schemes share: the calls that a TorchRL collector makes, and a push from the engine's
side."""

from __future__ import annotations

import inspect
import uuid
from typing import Any, Literal, get_args

from instep import WeightSync
from instep.dropin.torchrl.reach import engines
from instep.errors import ConfigError
from instep.receipt import Receipt
from instep.source import Source
from instep.source.current import CurrentSource

try:
    from torchrl.weight_update import WeightSyncScheme
except ImportError:
    WeightSyncScheme = object

Strategy = Literal["tensordict", "state_dict"]


class Scheme(WeightSyncScheme):  # type: ignore[misc]
    """
    strategy: `tensordict` or `state_dict`. Either sends the same tensors, under the names that
    `save_pretrained` writes.
    settings: those of `instep.WeightSync`. A dtype that the engine does not store is rounded to the
        engine's, as the original's loader does it, unless they have cast=False.
    """

    def __init__(self, strategy: Strategy, settings: dict[str, Any]) -> None:
        if strategy not in get_args(Strategy):
            raise ConfigError(f"strategy must be 'tensordict' or 'state_dict', not {strategy!r}")
        inspect.signature(WeightSync).bind(None, [], **settings)
        if WeightSyncScheme is not object:
            super().__init__(strategy)
        self.strategy_name = strategy
        self.settings = {"cast": True, **settings}
        self._sender: Any = None

    def create_sender(self) -> Any:
        raise NotImplementedError

    @property
    def sender(self) -> Any:
        """The sender behind `send`, which collectors call. A model that is registered with it need
        not be given to the collector."""
        if self._sender is None:
            self._sender = self.create_sender()
        return self._sender

    def _init_on_sender_impl(self, *, model_id: str | None = None, context: Any = None, **unknown: Any) -> None:
        if unknown:
            raise ConfigError(
                f"a scheme of vLLM's is not shared out by {', '.join(unknown)}",
                next_step="init_on_sender(model_id=..., context=collector), or use create_sender()",
            )
        self.model_id, self.context = model_id, context

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, **_: Any) -> None:  # noqa: ARG002
        raise ConfigError(
            "a scheme of vLLM's is not received through a collector's worker",
            next_step="the engine's side is scheme.create_receiver(engine)",
        )

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Sends nothing unless weights are given: engines start with weights of their own.
        worker_idx is refused."""
        if worker_idx is not None:
            raise ConfigError("every engine takes an update or none does: worker_idx cannot choose among them")
        if not self.initialized_on_sender:
            super().connect(weights=weights)  # which says that init_on_sender comes first
        self.synchronized_on_sender = True
        if weights is not None:
            self.send(weights)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        if worker_ids is not None:
            raise ConfigError("every engine takes an update or none does: worker_ids cannot choose among them")
        self.sender.update_weights(weights)

    def shutdown(self) -> None:
        if self.__dict__.get("_sender") is not None:
            self._sender.shutdown()
            self._sender = None
        if WeightSyncScheme is not object:
            super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_sender": None}


class LocalPush:
    """Brings weights at hand to an engine."""

    def __init__(self, vllm_engine: Any, settings: dict[str, Any]) -> None:
        self._source = CurrentSource()
        self._sync = WeightSync(self._source, engines(vllm_engine), **settings)

    def push(self, source: Source, version: str | None = None) -> Receipt:
        self._source.source = source
        return self._sync.push(version or f"applied-{uuid.uuid4().hex}")

    def close(self) -> None:
        self._sync.close()
