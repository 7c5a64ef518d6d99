"""The trainer's side: finds the engines once, then every update is a `WeightSync.push`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from instep import WeightSync
from instep.dropin.torchrl.reach import reach
from instep.dropin.torchrl.weights import JOIN, AnnouncedSource, Metadata, described, open_weights
from instep.engine import Engine
from instep.engine.member import Member
from instep.engine.remote.rpc import RemoteEngine, Rpc
from instep.engine.remote.tcp import TcpListener
from instep.errors import ConfigError, TransportError
from instep.protocol import Identity, TensorMeta
from instep.receipt import Receipt

if TYPE_CHECKING:
    from instep.dropin.torchrl.collective import VLLMWeightSyncScheme

AGAIN = 0.02  # seconds between two questions whether a receiver is there
logger = logging.getLogger("instep")


class VLLMWeightSender:
    """The trainer's half of a scheme, with the methods of TorchRL's. Made by
    `VLLMWeightSyncScheme.create_sender`."""

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self._scheme = scheme
        self._workers: dict[int, list[Engine | Rpc]] = {}
        self._collectors: list[Any] = []
        self._source = AnnouncedSource()
        self._listener: TcpListener | None = None
        self._sync: WeightSync | None = None
        self._name, self._updates = secrets.token_hex(4), 0
        self.model: Any = None

    @property
    def joined(self) -> bool:
        return self._sync is not None

    def register_model(self, model: Any) -> None:
        """The model whose weights `update_weights()` sends. It is kept alive."""
        self.model = model

    def register_collector(self, collector: Any) -> None:
        """After each update `collector.increment_version()` is called. An error there is logged,
        the update stands."""
        self._collectors.append(collector)

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """The way to a receiver, instead of TCP: an end of a `multiprocessing.Pipe`, or whatever
        `init_all_workers_group` takes as an engine. Raises `ConfigError` for anything else."""
        self._workers[worker_idx] = reach(pipe_or_context)

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any = None) -> None:
        """Finds the engines, and compares what their receivers were told of the model with
        `model_metadata`.

        vllm_engine: an engine of this process, a policy that holds one, a receiver, an end of a
            pipe, an `Rpc`, the handle of a Ray actor with a method `answer`, something with such
            handles in `.actors` (`AsyncVLLM`), or a list of these. Without it: registered workers,
            or the receivers that dial the scheme's address.

        Raises `TransportError` where a receiver does not come in time, `PlanError` where it was
        told of another model, `ConfigError` where the scheme says another number of engines or of
        workers than there are.
        """
        self.shutdown()
        announced, scheme = described(model_metadata), self._scheme
        scheme.check_device()
        try:
            found = self._registered() or self._dialled() if vllm_engine is None else reach(vllm_engine)
            if len(found) != scheme.num_replicas:
                raise ConfigError(
                    f"the scheme says num_replicas={scheme.num_replicas}, there are {len(found)} engines",
                    next_step=f"make it with num_replicas={len(found)}",
                )
            behind = [RemoteEngine(way) for way in found if not isinstance(way, Engine)]
            asyncio.run(join(behind, announced, scheme.timeout))
            here = [way for way in found if isinstance(way, Engine)]
            if scheme.gpus_per_replica is not None:
                asyncio.run(check_workers([*here, *behind], scheme.gpus_per_replica, scheme.timeout))
            self._sync = WeightSync(self._source, [*here, *behind], **scheme.settings)
        except BaseException:
            self.shutdown()
            raise
        self._source.announced = announced

    def _registered(self) -> list[Engine | Rpc]:
        return [way for ways in self._workers.values() for way in ways]

    def _dialled(self) -> list[Engine | Rpc]:
        scheme = self._scheme
        self._listener = TcpListener(scheme.master_address, scheme.master_port, scheme.token)
        return [*self._listener.accept(scheme.num_replicas, scheme.timeout)]

    def update_weights(self, weights: Any = None) -> Receipt:
        """Brings every engine to these weights: a module, a TensorDict, a mapping; those of the
        registered model by default.

        Raises what `WeightSync.push` raises. No byte has moved where the weights are not those that
        were announced.
        """
        if self._sync is None:
            raise ConfigError("call init_all_workers_group first")
        weights = self.model if weights is None else weights
        self._source.source = None if weights is None else open_weights(weights, self._source.announced)
        self._updates += 1
        receipt = self._sync.push(f"{self._name}-{self._updates}")
        for collector in self._collectors:
            try:
                collector.increment_version()
            except Exception:
                logger.exception("%s is served, but a collector did not count it", receipt.version)
        return receipt

    def shutdown(self) -> None:
        """Leaves the engines, which go on serving what they serve."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


async def join(engines: Sequence[RemoteEngine], announced: dict[str, TensorMeta], seconds: float) -> None:
    """Returns when every receiver is there and was told of the same model."""

    async def one(engine: RemoteEngine) -> None:
        while not await engine.ask(bool, JOIN, list(announced.values()), seconds):  # noqa: ASYNC110
            await asyncio.sleep(AGAIN)

    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(one(engine) for engine in engines))
    except TimeoutError:
        raise TransportError(
            f"a receiver of {', '.join(engine.name for engine in engines)} was not initialised within {seconds:g} s",
            next_step="call init_all_workers_group of sender and receivers at the same time; a Ray actor that holds a receiver needs "
            "max_concurrency of 2 or more",
        ) from None


async def check_workers(engines: Sequence[Engine], expected: int, seconds: float) -> None:
    """Raises `ConfigError` for an engine that has not `expected` workers."""
    for engine in engines:
        workers = len(await Member(engine, secrets.token_hex(8), seconds).call("hello", Identity))
        if workers != expected:
            raise ConfigError(
                f"the scheme says gpus_per_replica={expected}, {engine.name} has {workers} (tensor × pipeline × data parallel)",
                next_step=f"make it with gpus_per_replica={workers}, or with None where engines differ",
            )
