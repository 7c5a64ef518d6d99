"""The engine's side: an engine that answers its trainer."""

from __future__ import annotations

import asyncio
import time
import weakref
from concurrent.futures import Future
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from instep.dropin.torchrl.reach import in_actors
from instep.dropin.torchrl.scheme import LocalPush
from instep.dropin.torchrl.weights import Metadata, described, differences, open_weights
from instep.engine import connect
from instep.engine.rpc import Door, Endpoint, outcome
from instep.errors import ConfigError, PlanError, TransportError
from instep.protocol import TensorMeta

if TYPE_CHECKING:
    from instep.dropin.torchrl.collective import VLLMWeightSyncScheme

JOIN = "join"
"""The trainer's first request: what it was told of the model, and how long it waits for an answer."""
Joining = tuple[list[TensorMeta], float]
AGAIN = 0.02  # seconds between two looks for a new version


class VLLMWeightReceiver:
    """The engine's half of a scheme, with the methods of TorchRL's.

    vllm_engine: a `vllm.LLM`, an `AsyncLLM`, or whatever else `WeightSync` takes. One that lives in Ray actors is reached by the trainer
        itself: then there is nothing to do here, and nothing that `poll_and_apply` could see.

    The way to the trainer is TCP, unless another one is registered, or has `answer` called (in the event loop of an `AsyncLLM`: awaits
    `aanswer`).
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any = None) -> None:
        self._scheme = scheme
        self._model_ref = vllm_engine
        self._context: Any = None
        self._door: Door | None = None
        self._endpoint: Endpoint | None = None
        self._announced: dict[str, TensorMeta] = {}
        self._joined: Future[None] = Future()
        self._local: LocalPush | None = None
        self._seen: str | None = None

    def register_model(self, model_ref: Any) -> None:
        """The engine, or its dotted path from the context: `policy.model`."""
        self._model_ref = model_ref

    def set_context(self, context: Any) -> None:
        """Where a dotted path starts. It is not kept alive."""
        self._context = weakref.ref(context)

    def register_worker_transport(self, pipe: Door) -> None:
        """The way to the trainer, instead of TCP."""
        self._door = pipe

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Lets the trainer in, and returns when it has come. Its updates then arrive on their own.

        Raises `TransportError` where no trainer comes in time, `PlanError` where it was told of another model.
        """
        timeout, engine = self._scheme.timeout, self._engine()
        if in_actors(engine):
            return  # which the trainer reaches without this process
        self._joined, self._seen = Future(), None
        self._announced, self._endpoint = described(model_metadata), Endpoint(connect(engine), timeout)
        door = self._door or self._scheme.create_transport()
        door.serve(self.aanswer)
        self._door = door
        try:
            self._joined.result(timeout)
        except TimeoutError:
            problem = door.problem
            self.shutdown()
            raise TransportError(
                f"no trainer came within {timeout:g} s" + (f"; {problem}" if problem else ""),
                next_step="call init_all_workers_group of sender and receivers at the same time, with one scheme: "
                "one address, port and token",
            ) from None
        except PlanError:
            self.shutdown()
            raise
        if door.problem:  # the trainer has come another way
            door.close()

    def answer(self, method: str, payload: bytes) -> bytes:
        """One request of the trainer, from a thread without an event loop. Never raises."""
        return asyncio.run(self.aanswer(method, payload))

    async def aanswer(self, method: str, payload: bytes) -> bytes:
        """One request of the trainer. Never raises."""
        endpoint = self._endpoint
        if method == JOIN:
            return await outcome(self._join(payload))
        if endpoint is None:
            return await outcome(self._closed())
        return await endpoint.answer(method, payload)

    async def _closed(self) -> None:
        raise ConfigError("this receiver lets no trainer in", next_step="call its init_all_workers_group")

    async def _join(self, payload: bytes) -> bool:
        theirs, timeout = msgspec.msgpack.decode(payload, type=Joining)
        if self._endpoint is None:
            return False
        self._endpoint.timeout = timeout
        if different := differences({meta.name: meta for meta in theirs}, self._announced, ("at the trainer", "here")):
            error = PlanError(f"trainer and receiver were told of different models: {different}")
            if not self._joined.done():
                self._joined.set_exception(error)
            raise error
        if not self._joined.done():
            self._joined.set_result(None)
        return True

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Brings weights at hand to the engine, while no trainer does. With None it does nothing.

        Raises `ConfigError` once a trainer has come: it must know what its engines serve.
        """
        if weights is None:
            return
        if not inplace:
            raise ConfigError("an engine's weights are changed in place")
        if self._endpoint is not None:
            raise ConfigError("a trainer brings this engine's weights: call update_weights of its sender")
        self._local = self._local or LocalPush(self._engine(), self._scheme.settings)
        self._local.push(open_weights(weights))

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Whether a version has arrived since the last call. Waits for one no longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._endpoint is None or self._endpoint.version == self._seen:
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(AGAIN, max(0.0, deadline - time.monotonic())))
        self._seen = self._endpoint.version
        return True

    def shutdown(self) -> None:
        """Lets no trainer in any more."""
        self._endpoint = None
        if self._door is not None:
            self._door.close()

    def _engine(self) -> Any:
        engine = self._model_ref
        if isinstance(engine, str):
            context = self._context() if self._context is not None else None
            if context is None:
                raise ConfigError(f"{engine!r} is a path from a context, and there is none, or none any more", next_step="call set_context")
            engine = attrgetter(engine)(context)
        return engine
