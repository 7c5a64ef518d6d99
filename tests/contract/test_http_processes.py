"""What servers and trainers serve after one of them died, slept or had no room: real processes, real sockets, engines in memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.memory_server import HERE, TOKEN, Process
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http import HttpEngine
from instep.errors import EngineLost, EngineTimeout, SyncError, TransportError
from instep.transport.shm import segment as shm
from instep.transport.store import own_address

SEED = {seed: str(MemoryEngine(attention(seed)).fingerprint()) for seed in range(4)}
"""What an engine with these weights tells of them."""


@pytest.fixture(scope="module")
def started() -> Iterator[list[Process]]:
    found = [Process(), Process()]
    yield found
    for server in found:
        server.kill()


@pytest.fixture
def servers(started: list[Process]) -> list[Process]:
    """Alive and awake; what they serve is what the test before has left."""
    for server in started:
        server.signal(signal.SIGCONT)
        if server.process.poll() is not None:
            server.start()
    return started


@pytest.fixture
def server(servers: list[Process]) -> Process:
    return servers[0]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Of segments that are named in shared memory."""
    yield
    shm.sweep()
    assert [path for path in shm.directory().glob("instep-*") if path.stat().st_uid == os.getuid() and _unlocked(path)] == []


def _unlocked(path: Path) -> bool:
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # another trainer's, which lives
        return True


def engine(server: Process) -> HttpEngine:
    return HttpEngine(server.url, TOKEN)


def push(server: Process, seed: int, version: str, **settings: Any) -> None:
    with WeightSync(attention(seed), [engine(server)], **settings) as sync:
        sync.push(version)


def test_two_servers_follow_a_trainer(servers: list[Process]) -> None:
    weights = attention(1)
    with WeightSync(weights, [engine(server) for server in servers]) as sync:
        for seed in (1, 2):
            weights.update(attention(seed))
            sync.push(f"a{seed}")
            assert [server.serves()["fingerprint"] for server in servers] == [SEED[seed]] * 2
        assert len({state.engine for state in sync.status()}) == 2


@pytest.mark.parametrize("transport", ["shm", "gloo", "http"])
def test_every_way_for_the_bytes(server: Process, transport: Any) -> None:
    push(server, 1, transport, transport=transport)
    assert server.serves() == {"version": transport, "fingerprint": SEED[1], "paused": False}


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_server_on_another_host_is_reached_by_this_hosts_address(
    server: Process, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on this one, and the trainer takes it for another."""
    monkeypatch.setattr("instep.transport.host", lambda: "another")
    with WeightSync(attention(2), [engine(server)], transport=transport, timeout=20) as sync:
        sync.push(f"far-{transport}")
        assert sync._session.current is not None
        location = sync._session.current.manifest.location
        assert location.transport == ("gloo" if transport == "auto" else "http")
        assert own_address() in location.address.split("@")
    assert server.serves() == {"version": f"far-{transport}", "fingerprint": SEED[2], "paused": False}


def test_one_of_two_servers_is_killed(servers: list[Process]) -> None:
    weights = attention(1)
    dead, alive = servers
    with WeightSync(weights, [engine(server) for server in servers], timeout=20) as sync:
        sync.push("c1")
        dead.kill()
        weights.update(attention(2))
        with pytest.raises(EngineLost) as caught:
            sync.push("c2")
        assert [state.serving for state in caught.value.engines] == ["unknown", "old"]
        assert alive.serves() == {"version": "c1", "fingerprint": SEED[1], "paused": False}
        dead.start()
        sync.push("c3")
        assert [server.serves()["version"] for server in servers] == ["c3", "c3"]
    with WeightSync(attention(3), [engine(server) for server in servers], timeout=20, require="any") as sync:
        dead.kill()
        assert [state.serving for state in sync.push("c4").failed] == ["unknown"]
        assert alive.serves()["fingerprint"] == SEED[3]
        dead.start()
        sync.catch_up()
        assert dead.serves() == alive.serves()


def test_a_server_that_is_killed_within_a_commit_and_restarted_catches_up(server: Process) -> None:
    server.inject("commit", "hang")
    with WeightSync(attention(1), [engine(server)], timeout=20) as sync:
        failures: list[BaseException] = []
        thread = threading.Thread(target=lambda: _caught(lambda: sync.push("d1"), failures))
        thread.start()
        server.until(lambda: server.status()["paused"])
        server.kill()
        thread.join(20)
        assert [type(failure) for failure in failures] == [EngineLost]
        server.start()
        assert server.serves()["fingerprint"] == SEED[0]
        sync.push("d2")
        assert server.serves() == {"version": "d2", "fingerprint": SEED[1], "paused": False}


def _caught(action: Any, failures: list[BaseException]) -> None:
    try:
        action()
    except Exception as error:
        failures.append(error)


def test_a_server_that_sleeps_for_longer_than_the_deadline(server: Process) -> None:
    weights = attention(1)
    with WeightSync(weights, [engine(server)], timeout=1.5) as sync:
        sync.push("e1")
        server.signal(signal.SIGSTOP)
        started = time.monotonic()
        weights.update(attention(2))
        with pytest.raises(EngineTimeout) as caught:
            sync.push("e2")
        assert time.monotonic() - started < 10
        assert [state.serving for state in caught.value.engines] == ["unknown"]
        server.signal(signal.SIGCONT)
        server.until(lambda: server.serves()["version"] == "e1")
        sync.push("e3")
        assert server.serves() == {"version": "e3", "fingerprint": SEED[2], "paused": False}


def test_a_server_that_sleeps_within_a_commit_is_taken_back(server: Process) -> None:
    weights = attention(1)
    with WeightSync(weights, [engine(server)], timeout=1.5) as sync:
        sync.push("f1")
        weights.update(attention(2))
        server.inject("commit", "hang")
        with pytest.raises(EngineTimeout):
            sync.push("f2")
        sync.push("f3")
        assert server.serves() == {"version": "f3", "fingerprint": SEED[2], "paused": False}


TRAINER = """
import sys
from helpers.toys import attention
from instep import WeightSync
from instep.engine.remote.http import HttpEngine
sync = WeightSync(attention(2), [HttpEngine(sys.argv[1], sys.argv[2])], timeout=2)
print("pushing", flush=True)
sync.push("doomed")
"""


@pytest.mark.parametrize("point", ["prepare", "pause", "commit"])
def test_a_trainer_that_is_killed_within_a_push(server: Process, point: str) -> None:
    """The server goes on with the whole version it has, another trainer can push at once, and the segment goes with the next trainer."""
    push(server, 1, f"before-{point}")
    server.inject(point, "hang")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, server.url, TOKEN], env=environment, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"pushing\n"
    time.sleep(0.7)
    trainer.kill()
    trainer.wait(20)
    trainer.stdout.close()
    server.until(lambda: server.health() == 200 and not server.status()["paused"], 15)
    assert (server.serves()["version"], server.serves()["fingerprint"]) == (f"before-{point}", SEED[1])
    server.until(lambda: [worker["prepared"] for worker in server.status()["workers"]] == [None], 15)
    push(server, 3, f"after-{point}", timeout=10)
    assert server.serves() == {"version": f"after-{point}", "fingerprint": SEED[3], "paused": False}


def test_a_trainer_that_dies_between_two_requests_keeps_nobody_away(server: Process) -> None:
    """No connection breaks within a request: its silence tells."""
    push(server, 1, "k1")
    dies = "import os; from instep.steps import Push; Push.commit = lambda *_: os._exit(9)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])}
    trainer = [sys.executable, "-c", TRAINER.replace("sync.push", dies + "sync.push"), server.url, TOKEN]
    assert subprocess.run(trainer, env=environment, timeout=60, stdout=subprocess.DEVNULL).returncode == 9
    server.until(lambda: [worker["prepared"] for worker in server.status()["workers"]] == [None], 15)
    push(server, 3, "k2", timeout=10)
    assert server.serves() == {"version": "k2", "fingerprint": SEED[3], "paused": False}


def test_a_trainer_without_room_in_shared_memory_says_so(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    push(server, 1, "h1")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with WeightSync(attention(2), [engine(server)], transport="shm") as sync, pytest.raises(TransportError, match="No space left"):
        sync.push("h2")
    assert server.serves() == {"version": "h1", "fingerprint": SEED[1], "paused": False}
    push(server, 2, "h3")  # by another way
    assert server.serves()["fingerprint"] == SEED[2]


def test_generation_loses_no_request_while_fifty_versions_arrive(server: Process) -> None:
    weights = attention(1)
    seen: list[str] = []

    async def generate(client: Any, done: asyncio.Event) -> None:
        while not done.is_set():
            answer = await client.post(server.url + "/v1/completions")
            seen.append(answer.raise_for_status().json()["version"])

    async def main() -> None:
        done = asyncio.Event()
        with WeightSync(weights, [engine(server)]) as sync:
            await sync.apush("0")
            async with httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_connections=None)) as client:
                tasks = [asyncio.create_task(generate(client, done)) for _ in range(64)]
                for version in range(1, 51):
                    weights["model.norm.weight"].add_(1)
                    await sync.apush(str(version))
                done.set()
                await asyncio.gather(*tasks)

    asyncio.run(main())
    assert server.serves()["version"] == "50"
    assert len(set(seen)) > 10


def test_a_push_that_is_cancelled_leaves_a_server_that_can_be_pushed_to(server: Process) -> None:
    push(server, 1, "j1")
    server.inject("commit", "hang")

    async def main() -> None:
        with WeightSync(attention(2), [engine(server)], timeout=30) as sync:
            task = asyncio.create_task(sync.apush("j2"))
            await asyncio.sleep(0.7)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    server.until(lambda: not server.status()["paused"], 40)
    push(server, 3, "j3")
    assert server.serves()["fingerprint"] == SEED[3]


def test_an_error_names_the_server_and_what_to_do() -> None:
    server = Process()
    server.kill()
    with WeightSync(attention(1), [engine(server)]) as sync, pytest.raises(SyncError, match=f"127.0.0.1:{server.port}") as caught:
        sync.push("k1")
    assert "restart it, then push again" in str(caught.value)
