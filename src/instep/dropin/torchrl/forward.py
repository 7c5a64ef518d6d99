"""A trainer that was not given the engines in Ray actors reaches them through their receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from instep.dropin.torchrl.weights import JOIN, Joining, differences
from instep.engine.remote.ray import RayRpc
from instep.engine.remote.rpc import outcome
from instep.engine.remote.tcp import TcpDoor
from instep.errors import InstepError, PlanError
from instep.protocol import TensorMeta


class Forward:
    """Hands a trainer's requests to one actor, from the moment that it is made.

    It dials the trainer for `timeout` seconds: one that was given the actors never listens.
    """

    def __init__(
        self,
        door: Callable[[str], TcpDoor],
        way: RayRpc,
        announced: Mapping[str, TensorMeta],
        timeout: float,
    ) -> None:
        self.rpc, self.announced = way, announced
        self.door = door(self.rpc.name)
        self.door.serve(self.answer)
        self.timer = threading.Timer(timeout, self._give_up)
        self.timer.daemon = True
        self.timer.start()

    @property
    def problem(self) -> str | None:
        return self.door.problem

    def close(self) -> None:
        self.timer.cancel()
        self.door.close()

    def _give_up(self) -> None:
        if self.problem:
            self.door.close()

    async def answer(self, method: str, payload: bytes) -> bytes:
        """The actor's answer. Never raises."""
        try:
            if method == JOIN:
                self._compare(payload)
            return await self.rpc.call(method, payload)
        except InstepError as error:
            return await outcome(_raised(error))

    def _compare(self, payload: bytes) -> None:
        theirs, _ = msgspec.msgpack.decode(payload, type=Joining)
        if different := differences(
            {meta.name: meta for meta in theirs},
            self.announced,
            ("at the trainer", "at the receiver"),
        ):
            raise PlanError(f"trainer and receiver were told of different models: {different}")


async def _raised(error: Exception) -> None:
    raise error
