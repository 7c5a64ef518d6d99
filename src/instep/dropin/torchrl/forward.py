"""A trainer that was not given the engines in Ray actors reaches them through their receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from instep.dropin.torchrl.weights import JOIN, Joining, check_told
from instep.engine.remote.ray import RayRpc
from instep.engine.remote.rpc import failed
from instep.engine.remote.tcp import TcpDoor
from instep.errors import InstepError
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
                theirs, _ = msgspec.msgpack.decode(payload, type=Joining)
                check_told(theirs, self.announced, "at the receiver")
            return await self.rpc.call(method, payload)
        except InstepError as error:
            return failed(error)
