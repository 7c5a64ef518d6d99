"""Engines that give up control wherever one in another process would, and ways to reach them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from helpers.asgi import asgi_engine
from instep import MemoryEngine
from instep.engine import CachePolicy
from instep.engine.remote.http_control import Served
from instep.engine.remote.rpc import Endpoint, LocalRpc, RemoteEngine
from instep.engine.remote.tcp import TcpDoor, TcpListener
from instep.protocol import Method


class Waiting(MemoryEngine):
    """Gives up control before and after all that it does, as an engine in another process."""

    async def _between(self, step: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        found = await step()
        await asyncio.sleep(0)
        return found

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        do = super().call
        found: list[bytes] = await self._between(lambda: do(method, payload))
        return found

    async def pause(self, caches: CachePolicy) -> None:
        do = super().pause
        await self._between(lambda: do(caches))

    async def resume(self) -> None:
        await self._between(super().resume)

    async def label(self, version: str) -> None:
        do = super().label
        await self._between(lambda: do(version))

    async def refuse(self, reason: str | None) -> None:
        do = super().refuse
        await self._between(lambda: do(reason))


@contextmanager
def local(engine: MemoryEngine) -> Iterator[Any]:
    yield engine


@contextmanager
def endpoint(engine: MemoryEngine) -> Iterator[Any]:
    yield RemoteEngine(LocalRpc(Endpoint(engine).answer))


@contextmanager
def tcp(engine: MemoryEngine) -> Iterator[Any]:
    listener = TcpListener("127.0.0.1", 0, "token")
    door = TcpDoor("127.0.0.1", listener.port, "token")
    door.serve(Endpoint(engine).answer)
    yield RemoteEngine(listener.accept(1, 30)[0])
    door.close()
    listener.close()


@contextmanager
def http(engine: MemoryEngine) -> Iterator[Any]:
    yield asgi_engine(Served(engine, "token-of-the-tests"))


WAYS = {"local": local, "endpoint": endpoint, "tcp": tcp, "http": http}


def in_a_thread(action: Callable[..., Any]) -> Any:
    """An engine that is paused must not stop the test's thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(20)
