"""What servers serve after `instep push` was interrupted or killed within a push: real processes, real sockets, engines in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.loopback_server import saved
from helpers.memory_server import HERE, TOKEN, Process
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http import HttpEngine

SEED = {seed: str(MemoryEngine(attention(seed)).fingerprint()) for seed in range(4)}
PUSH = "from instep.cli import main; from instep.cli import push; push.SECONDS = {seconds}; main()"


@pytest.fixture(scope="module")
def started() -> Iterator[list[Process]]:
    found = [Process(), Process()]
    yield found
    for server in found:
        server.kill()


@pytest.fixture
def servers(started: list[Process]) -> list[Process]:
    """Both serve seed 1, under a version that no test pushes."""
    with WeightSync(attention(1), [HttpEngine(server.url, TOKEN) for server in started], timeout=60) as sync:
        sync.push(f"before-{time.monotonic_ns()}")
    return started


def begun(folder: Path, servers: list[Process], seconds: float) -> subprocess.Popen[str]:
    """`instep push` of seed 2 as version `doomed`, with a deadline of so many seconds."""
    paths = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "INSTEP_TOKEN": TOKEN}
    model, urls = saved(attention(2), folder / "doomed"), [server.url for server in servers]
    command = [sys.executable, "-c", PUSH.format(seconds=seconds), "push", str(model), "--engine", *urls]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepared(server: Process) -> list[Any]:
    return [worker["prepared"] for worker in server.status()["workers"]]


def whole(server: Process) -> str:
    """The version that it serves, of which it holds all."""
    served = server.serves()
    assert served["fingerprint"] == SEED[2 if served["version"] == "doomed" else 1]
    return str(served["version"])


def take_over(servers: list[Process]) -> None:
    """Another trainer pushes at once."""
    with WeightSync(attention(3), [HttpEngine(server.url, TOKEN) for server in servers], timeout=20) as sync:
        sync.push("after")
    assert [server.serves() for server in servers] == [{"version": "after", "fingerprint": SEED[3], "paused": False}] * len(servers)


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 6), (signal.SIGINT, 300)])
def test_a_trainer_that_ends_while_it_waits_for_another_engine_keeps_nobody_away(
    number: signal.Signals, seconds: float, servers: list[Process], tmp_path: Path
) -> None:
    """This one has a version prepared, and is asked for nothing. Killed, the trainer is missed within its deadline, long before the lease
    is over; interrupted, it says so itself."""
    waits, hangs = servers
    hangs.inject("prepare", "hang")
    trainer = begun(tmp_path, servers, seconds)
    waits.until(lambda: prepared(waits) == ["doomed"], 120)
    trainer.send_signal(number)
    trainer.communicate(timeout=120)
    waits.until(lambda: prepared(waits) == [None], 2.5 * seconds if number == signal.SIGKILL else 30)
    assert whole(waits).startswith("before-")
    take_over([waits])


@pytest.mark.parametrize(
    ("number", "point"), [(signal.SIGTERM, "commit"), *((signal.SIGINT, point) for point in ("prepare", "pause", "commit", "label"))]
)
def test_an_interrupted_push_says_what_each_engine_serves(
    number: signal.Signals, point: str, servers: list[Process], tmp_path: Path
) -> None:
    """It ends with 130, its engines go on with one whole version each, and another trainer can push at once."""
    hangs, other = servers
    hangs.inject(point, "hang")
    trainer = begun(tmp_path, servers, 5)
    other.until(lambda: not hangs.faults(), 120)
    time.sleep(0.3)
    trainer.send_signal(number)
    out, err = trainer.communicate(timeout=120)
    assert (trainer.returncode, out) == (130, ""), err
    lines = err.partition("interrupted; what each engine serves now:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == [f"127.0.0.1:{server.port}:" for server in servers], err
    assert "Traceback" not in err
    for server in servers:
        server.until(lambda server=server: server.health() == 200 and not server.status()["paused"], 30)
    versions = [whole(server) for server in servers]
    for line, version in zip(lines, versions, strict=True):
        assert line.endswith((f" serves {version}", f" is paused, and holds {version}", " does not answer"))
    take_over(servers)
