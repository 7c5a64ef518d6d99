"""The engine's side: an engine that answers its trainer."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from instep.dropin.torchrl.context import FromContext
from instep.dropin.torchrl.forward import Forward
from instep.dropin.torchrl.reach import door_of, engine_of, in_actors, ways_to_actors
from instep.dropin.torchrl.scheme import LocalPush
from instep.dropin.torchrl.weights import JOIN, Joining, Metadata, check_told, described, open_weights
from instep.engine import connect
from instep.engine.remote.rpc import Door, Endpoint, failed, outcome
from instep.errors import ConfigError, PlanError, TransportError
from instep.protocol import TensorMeta

if TYPE_CHECKING:
    from instep.dropin.torchrl.collective import VLLMWeightSyncScheme

AGAIN = 0.02  # seconds between two looks for a new version


class VLLMWeightReceiver(FromContext):
    """The engine's half of a scheme, with the methods of TorchRL's.

    vllm_engine: a `vllm.LLM`, an `AsyncLLM`, a policy that holds one as `model`, or whatever else
        `WeightSync` takes. Engines in Ray actors, as `AsyncVLLM` has them, are reached by the
        trainer itself or, where it was not given them, through this receiver: then nothing is
        waited for here, and there is nothing that `poll_and_apply` could see.

    The way to the trainer is TCP, unless another one is registered, or has `answer` called (in the
    event loop of an `AsyncLLM`: awaits `aanswer`).
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any = None) -> None:
        super().__init__(vllm_engine)
        self._scheme = scheme
        self._doors: list[Door] = []
        self._came: Door | None = None  # the one that the trainer has come through
        self._forwards: list[Forward] = []
        self._endpoint: Endpoint | None = None
        self._announced: dict[str, TensorMeta] = {}
        self._joined: Future[None] = Future()
        self._local: LocalPush | None = None
        self._seen: str | None = None

    def register_model(self, model_ref: Any) -> None:
        super().register_model(model_ref)
        self._local = None

    def register_worker_transport(self, pipe: Any) -> None:
        """The way to the trainer: an end of a `multiprocessing.Pipe`, beside TCP, or a `Door`
        instead of it.

        Raises `ConfigError` for what is neither.
        """
        for door in self._doors:
            door.close()
        beside = [self._scheme.create_door()] if isinstance(pipe, Connection) else []
        self._doors = [door_of(pipe), *beside]

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Lets the trainer in, and returns when it has come. Its updates then arrive on their own.

        Raises `TransportError` where no trainer comes in time, `PlanError` where it was told of
        another model.
        """
        timeout, engine = self._scheme.timeout, engine_of(self._engine())
        self._announced = described(model_metadata)
        if in_actors(engine):
            self.shutdown()
            self._forwards = [Forward(self._scheme.create_door, way, self._announced, timeout) for way in ways_to_actors(engine)]
            return
        self._joined, self._seen, self._came = Future(), None, None
        self._endpoint = Endpoint(connect(engine), timeout)
        self._doors = self._doors or [self._scheme.create_door()]
        for door in self._doors:
            door.serve(partial(self._through, door))
        try:
            self._joined.result(timeout)
        except TimeoutError:
            problem = "; ".join(door.problem for door in self._doors if door.problem)
            self.shutdown()
            raise TransportError(
                f"no trainer came within {timeout:g} s" + (f"; {problem}" if problem else ""),
                next_step="call init_all_workers_group of sender and receivers at the same time, with one scheme: "
                "one address, port and token",
            ) from None
        except PlanError:
            self.shutdown()
            raise
        for door in self._doors:
            if door is not self._came:
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
            return failed(ConfigError("this receiver lets no trainer in", next_step="call its init_all_workers_group"))
        return await endpoint.answer(method, payload)

    async def _through(self, door: Door, method: str, payload: bytes) -> bytes:
        if method == JOIN:
            self._came = door
        return await self.aanswer(method, payload)

    async def _join(self, payload: bytes) -> bool:
        theirs, timeout = msgspec.msgpack.decode(payload, type=Joining)
        if self._endpoint is None:
            return False
        self._endpoint.timeout = timeout
        try:
            check_told(theirs, self._announced, "here")
        except PlanError as error:
            if not self._joined.done():
                self._joined.set_exception(error)
            raise
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
        """Whether a version has arrived since the last call. Waits for one no longer than `timeout`
        seconds."""
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
        for door in self._doors:
            door.close()
        for forward in self._forwards:
            forward.close()
