"""A child that was forked from a trainer, as a data loader's worker is: nothing of its parent's
push is its own, and what it keeps open does not outlive the parent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from helpers.named_weights import WEIGHTS
from helpers.loopback_server import MemoryServer
from instep import MemoryEngine, WeightSync
from instep.engine.vllm.publisher import WeightPublisher
from instep.errors import InstepError
from instep.transport.shm import segment as shm

folder = Path(sys.argv[1])
shm.directory = lambda: folder

def child(action, end=False):
    '''Runs it in a forked child. What it returns, or raises, its exit code, and whether it ended.

    end: with all that runs at the exit of an interpreter.
    '''
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            found = action()
        except InstepError as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(found).encode())
        if not end:
            os._exit(0)
        sys.exit()
    os.close(write)
    with open(read) as pipe:
        found = json.loads(pipe.read() or "null")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [found, code, time.monotonic() - started < 20]

def one_of_its_own(transport):
    def push():
        engine = MemoryEngine(WEIGHTS["start"])
        with WeightSync(WEIGHTS["b"], [engine], transport=transport, timeout=10) as own:
            return own.push("b").version
    return push

def to_a_server():
    with WeightSync(WEIGHTS["b"], [server.url], timeout=10) as own:
        return own.push("b").version

found = {}
for transport in ("shm", "http"):
    engine, source = MemoryEngine(WEIGHTS["start"]), dict(WEIGHTS["a"])
    with WeightSync(source, [engine], transport=transport, timeout=10) as sync:
        sync.push("a")
        found[transport] = {
            "push": child(lambda: sync.push("b").version),
            "catch_up": child(lambda: sync.catch_up().version),
            "status": child(lambda: str(sync.status())),
            "close": child(sync.close),
            "ends": child(lambda: None, end=True),
            "own": child(one_of_its_own(transport)),
        }
        found[transport]["parent"] = sync.push("c").version

publisher = WeightPublisher(WEIGHTS["a"])
publisher.update_info("a")
found["publisher"] = child(lambda: publisher.update_info("b")["manifest"])
publisher.close()

server = MemoryServer(WEIGHTS["start"], token=None)
with WeightSync(WEIGHTS["a"], [server.url], timeout=10) as sync:
    sync.push("a")
    found["server"] = child(to_a_server)
server.close()

alive, end = os.pipe()
told, tell = os.pipe()
trainer = os.fork()
if trainer == 0:
    os.close(end)
    sync = WeightSync(WEIGHTS["a"], [MemoryEngine(WEIGHTS["start"])], transport="shm", timeout=10)
    sync.push("a")
    if os.fork() == 0:
        os.write(tell, b".")
        os.read(alive, 1)  # lives until the test is over
        os._exit(0)
    os.read(told, 1)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(trainer, 0)
left = [path.name for path in folder.glob("instep-*")]
found["orphan"] = [left, shm.sweep()]
os.close(end)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of each case, all of them in one process: torch is imported once."""
    folder, tests = tmp_path_factory.mktemp("segments"), Path(__file__).parents[1]
    command = [sys.executable, "-c", PROCESS, str(folder), str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("transport", ["shm", "http"])
@pytest.mark.parametrize("call", ["push", "catch_up", "status"])
def test_a_call_in_a_child_is_refused_with_its_reason(found: Any, call: str, transport: str) -> None:
    text, code, soon = found[transport][call]
    assert text.startswith("ConfigError: this WeightSync is that of process ")
    assert "forked from it" in text
    assert "next: make a WeightSync of its own in the child" in text
    assert (code, soon) == (0, True)


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_a_child_may_end_or_close_and_the_parent_pushes_on(found: Any, transport: str) -> None:
    assert found[transport]["close"] == [None, 0, True]
    assert found[transport]["ends"] == [None, 0, True]
    assert found[transport]["parent"] == "c"


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_a_child_may_make_a_sync_of_its_own(found: Any, transport: str) -> None:
    assert found[transport]["own"] == ["b", 0, True]


def test_a_child_reaches_a_server_that_its_parent_has_talked_to(found: Any) -> None:
    assert found["server"] == ["b", 0, True]


def test_a_publisher_is_refused_in_a_child_too(found: Any) -> None:
    text, code, _ = found["publisher"]
    assert text.startswith("ConfigError: this WeightPublisher is that of process ")
    assert code == 0


def test_a_child_does_not_keep_the_segments_of_a_trainer_that_was_killed(found: Any) -> None:
    left, swept = found["orphan"]
    assert len(left) == 1
    assert swept == left
