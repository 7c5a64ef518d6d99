"""What every Rpc owes an engine: requests and answers as they are, errors by name, and an end to every wait."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.asgi import answering, asgi_rpc
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.engine.remote.pipe import PipeDoor, PipeRpc
from instep.engine.remote.rpc import Answer, Endpoint, LocalRpc, RemoteEngine, Rpc
from instep.engine.remote.tcp import TcpDoor, TcpListener
from instep.errors import ConfigError, EngineDirty, EngineLost, EngineTimeout, InstepError, PlanError

pytestmark = pytest.mark.usefixtures("segments")

Way = Callable[[Answer], Rpc]


def local(_: ExitStack) -> Way:
    return LocalRpc


def tcp(stack: ExitStack) -> Way:
    def way(answer: Answer) -> Rpc:
        listener = TcpListener("localhost", 0, "token")
        stack.callback(listener.close)
        door = TcpDoor("localhost", listener.port, "token")
        stack.callback(door.close)
        door.serve(answer)
        return listener.accept(1, timeout=10)[0]

    return way


def pipe(stack: ExitStack) -> Way:
    def way(answer: Answer) -> Rpc:
        ours, theirs = multiprocessing.Pipe()
        door = PipeDoor(theirs)
        stack.callback(door.close)
        door.serve(answer)
        return PipeRpc(ours)

    return way


def http(_: ExitStack) -> Way:
    return lambda answer: asgi_rpc(answering(Spy(), answer))


@pytest.fixture(params=[local, tcp, pipe, http], ids=["local", "tcp", "pipe", "http"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with ExitStack() as stack:
        yield request.param(stack)


class Spy:
    """An engine that notes what it is asked, and answers what it is told to."""

    name = "spy"

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.asked: list[tuple[Any, ...]] = []

    async def _note(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def call(self, method: str, payload: bytes) -> Any:
        return await self._note("call", method, payload)

    async def pause(self, caches: str) -> Any:
        return await self._note("pause", caches)

    async def resume(self) -> Any:
        return await self._note("resume")

    async def label(self, version: str) -> Any:
        return await self._note("label", version)

    async def score(self, token_ids: list[int]) -> Any:
        return await self._note("score", token_ids)

    async def refuse(self, reason: str | None) -> Any:
        return await self._note("refuse", reason)


def remote(way: Way, engine: Any) -> RemoteEngine:
    return RemoteEngine(way(Endpoint(engine).answer))


@pytest.mark.parametrize(
    ("asked", "result"),
    [
        (("call", "hello", b"\x00\xff" * 3), [b"", b"\xc0"]),
        (("call", "trace", b"x" * (1 << 22)), [b"y" * (1 << 22)]),
        (("pause", "reset"), None),
        (("pause", "keep"), None),
        (("resume",), None),
        (("label", "step-7"), None),
        (("score", [1, 2, 150_000]), [-0.1, -17.25]),
        (("refuse", "höchst schmutzig"), None),
        (("refuse", None), None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_requests_and_answers_arrive_as_they_are(way: Way, asked: tuple[Any, ...], result: Any) -> None:
    spy = Spy(result)
    method, *args = asked
    assert asyncio.run(getattr(remote(way, spy), method)(*args)) == result
    assert spy.asked == [asked]


ERRORS = [
    PlanError("no such name", tensor="a.weight"),
    EngineDirty("half"),
    EngineTimeout("late"),
    PlanError("asleep", next_step="wake it"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_arrive_by_name_with_their_advice(way: Way, error: InstepError) -> None:
    with pytest.raises(type(error), match=str(error.args[0])) as found:
        asyncio.run(remote(way, Spy(error)).resume())
    assert (found.value.tensor, found.value.next_step) == (error.tensor, error.next_step)


def test_any_other_error_means_that_it_is_not_known_what_the_engine_did(way: Way) -> None:
    with pytest.raises(EngineLost, match=r"ZeroDivisionError: by \?"):
        asyncio.run(remote(way, Spy(ZeroDivisionError("by \udcff"))).resume())


@pytest.mark.parametrize("result", [7, [b"a", 7], {"a": b""}], ids=str)
def test_an_answer_of_the_wrong_type_is_none(way: Way, result: Any) -> None:
    with pytest.raises(EngineLost, match="no valid answer"):
        asyncio.run(remote(way, Spy(result)).call("hello", b""))


def test_bytes_that_are_no_answer(way: Way) -> None:
    async def answer(method: str, payload: bytes) -> bytes:
        return b"\xc1 nonsense"

    with pytest.raises(EngineLost, match="no valid answer"):
        asyncio.run(RemoteEngine(way(answer)).resume())


def test_requests_overtake_one_that_hangs(way: Way) -> None:
    """A commit that never ends must not keep the trainer from asking what the engine serves."""

    async def answer(method: str, payload: bytes) -> bytes:
        if method == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return payload

    async def main() -> None:
        rpc = way(answer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rpc.call("hang", b""), 0.1)
        hanging = asyncio.create_task(rpc.call("hang", b""))
        answers = await asyncio.wait_for(asyncio.gather(*(rpc.call("echo", b"%d" % n) for n in range(10, 60))), 20)
        assert answers == [b"%d" % n for n in range(10, 60)]
        hanging.cancel()

    asyncio.run(main())


def test_calls_from_one_event_loop_after_the_other(way: Way) -> None:
    """Every `push` runs on a loop of its own."""
    engine = remote(way, Spy([b"hello"]))
    assert [asyncio.run(engine.call("hello", b"")) for _ in range(3)] == [[b"hello"]] * 3


@pytest.mark.parametrize("tp", [1, 2])
def test_pushes_reach_the_engine_bit_for_bit(way: Way, tp: int) -> None:
    engine = MemoryEngine(checkpoint(0), tp=tp)
    source = checkpoint(1)
    with WeightSync(source, [remote(way, engine)]) as sync:
        for seed in (1, 2, 3):
            source.update(checkpoint(seed))
            receipt = sync.push(f"v{seed}")
            assert engine.fingerprint() == MemoryEngine(checkpoint(seed), tp=tp).fingerprint()
            assert (engine.version, engine.paused, receipt.engines[0].read_back > 0) == (f"v{seed}", False, True)
        assert [state.version for state in sync.status()] == ["v3"]


def test_an_engine_that_cannot_take_the_tensors_says_so(way: Way) -> None:
    engine = MemoryEngine(checkpoint(0))
    with WeightSync({"nobody.knows": checkpoint(0)["model.norm.weight"]}, [remote(way, engine)]) as sync, pytest.raises(PlanError):
        sync.push("v1")
    assert engine.fingerprint() == MemoryEngine(checkpoint(0)).fingerprint()


def test_unknown_methods_and_arguments_are_refused(way: Way) -> None:
    spy = Spy()
    engine = remote(way, spy)
    for method, args in (("__init__", ()), ("asked", ()), ("generate", ([1],))):
        with pytest.raises(ConfigError, match="unknown method"):
            asyncio.run(engine.ask(type(None), method, *args))
    for method, args in (("pause", ("now",)), ("pause", ()), ("resume", (1,)), ("call", ("explode", b"")), ("score", (["a"],))):
        with pytest.raises(EngineLost, match="ValidationError"):
            asyncio.run(engine.ask(type(None), method, *args))
    assert spy.asked == []
