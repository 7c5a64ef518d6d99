"""A real `instep serve` in another process: pushes by its URL, who may make them, and what it serves after one that failed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.junk import attack
from http_server import TOKEN, Server
from models import PROMPTS, tiny
from plain_tokens import trainer_logprobs

from instep import WeightSync
from instep.engine.remote.http import HttpEngine
from instep.errors import ApplyError, ConfigError, EngineTimeout
from instep.transport.shm import segment as shm

FAMILY = "qwen3"
CLOSE = 0.25
"""Log-probabilities in bfloat16, by two programs."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny(FAMILY, 2)


@pytest.fixture
def sync(server: Server, model: Any) -> Iterator[WeightSync]:
    with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=60) as sync:
        yield sync


def become(model: Any, seed: int) -> None:
    model.load_state_dict(tiny(FAMILY, seed).state_dict())


def gap(answer: dict[str, Any], model: Any) -> float:
    """Between what the server and the trainer's forward say of the tokens."""
    there, here = answer["logprobs"], trainer_logprobs(model, answer["prompt"], answer["token_ids"], 1.0)
    return max(abs(one - other) for one, other in zip(there, here, strict=True))


def serves(server: Server, model: Any, version: str) -> None:
    """It answers with this version alone, and the trainer's forward agrees with what it says."""
    for answer in map(server.generate, PROMPTS):
        assert answer["versions"] == [version]
        assert answer["told"] == [version, version]
        assert gap(answer, model) < CLOSE
    status = server.status()
    assert (status["state"], status["versions"], status["paused"], status["refuses"]) == ("serving", [version], False, None)
    assert server.get("/health")[0] == 200


def test_pushes_bring_the_trainers_weights(server: Server, sync: WeightSync, model: Any) -> None:
    """None of them is what it has from disk, or from a push by another file."""
    before = server.generate(PROMPTS[0])
    for seed in (4, 3):
        become(model, seed)
        receipt = sync.push(f"seed-{seed}")
        serves(server, model, f"seed-{seed}")
        assert receipt.engines[0].read_back > 0
        assert gap(before, model) > 4 * CLOSE


@pytest.mark.parametrize("transport", ["gloo", "http"])
def test_the_bytes_may_come_another_way(server: Server, model: Any, transport: Any) -> None:
    become(model, 4 if transport == "gloo" else 5)
    with WeightSync(model, [HttpEngine(server.url, TOKEN)], transport=transport, canary=PROMPTS[0]) as sync:
        assert sync.push(f"by-{transport}").canary_gap is not None
    serves(server, model, f"by-{transport}")


def test_a_half_written_engine_says_503_and_lives(server: Server, sync: WeightSync, model: Any) -> None:
    become(model, 3)
    sync.push("whole")
    become(model, 2)
    server.inject("step", 3)
    with pytest.raises(ApplyError, match="told to fail"):
        sync.push("half")
    code, text = server.get("/health")
    assert (code, "told to fail" in text) == (503, True)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.generate(PROMPTS[0])
    assert server.get("/v1/models")[0] == 200
    assert server.status()["state"] == "dirty"
    sync.push("healed")
    serves(server, model, "healed")


TRAINER = """
import sys
sys.path.insert(0, sys.argv[3])
from models import tiny
from instep import WeightSync
from instep.engine.remote.http import HttpEngine
sync = WeightSync(tiny("qwen3", 3), [HttpEngine(sys.argv[1], sys.argv[2])], timeout=8)
print("pushing", flush=True)
sync.push("doomed")
"""


@pytest.mark.parametrize("point", ["prepare", "commit"])
def test_a_trainer_that_is_killed_within_a_push(server: Server, sync: WeightSync, model: Any, point: str) -> None:
    """The worker's answer comes after the trainer's death: the version that it holds then is whole, and the server goes on with it."""
    become(model, 2)
    sync.push(f"before-{point}")
    server.inject(f"hang:{point}", 4)
    command = [sys.executable, "-c", TRAINER, server.url, TOKEN, str(Path(__file__).parent)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"pushing\n"
    deadline = time.monotonic() + 60
    while server.fault.exists() or (point == "commit" and not _paused(server)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trainer.kill()
    trainer.wait(20)
    trainer.stdout.close()
    while (status := server.status())["paused"] or status["workers"][0]["prepared"]:
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)
    if status["versions"] == ["doomed"]:
        become(model, 3)
    serves(server, model, status["versions"][0])
    shm.sweep()
    assert not [path for path in shm.directory().glob("instep-*") if path.name in _opened(server)]
    become(model, 4)
    sync.close()
    with WeightSync(model, [HttpEngine(server.url, TOKEN)]) as another:
        another.push(f"after-{point}")
    serves(server, model, f"after-{point}")


def _paused(server: Server) -> bool:
    """The worker does not answer while it hangs."""
    code, _ = server.get("/instep/v1/status", seconds=0.3, authorization=f"Bearer {TOKEN}")
    return code == 0


def _opened(server: Server) -> str:
    maps = []
    for process in server.processes():
        try:
            maps.append(Path(f"/proc/{process}/maps").read_text())
        except OSError:
            continue
    return "".join(maps)


def test_a_server_that_sleeps_for_longer_than_the_deadline(server: Server, model: Any) -> None:
    become(model, 2)
    with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=8) as sync:
        sync.push("awake")
        server.signal(signal.SIGSTOP)
        try:
            become(model, 3)
            started = time.monotonic()
            with pytest.raises(EngineTimeout) as caught:
                sync.push("asleep")
            assert time.monotonic() - started < 40
            assert [state.serving for state in caught.value.engines] == ["unknown"]
        finally:
            server.signal(signal.SIGCONT)
        become(model, 2)
        serves(server, model, "awake")
        become(model, 3)
        sync.push("awake-again")
        serves(server, model, "awake-again")


@pytest.mark.program
def test_sixty_four_completions_at_once_while_fifty_versions_arrive(server: Server, sync: WeightSync, model: Any) -> None:
    """Every one ends, none with an error, and each has its versions in order."""
    order = {f"many-{number}": number for number in range(51)}
    sync.push("many-0")
    done = threading.Event()
    norm = model.get_parameter("model.norm.weight")

    def generate(index: int) -> list[dict[str, Any]]:
        found = []
        while not done.is_set():
            found.append(server.generate([1 + index, 2, 3], 40))
        return found

    with ThreadPoolExecutor(64) as pool:
        futures = [pool.submit(generate, index) for index in range(64)]
        try:
            for version in range(1, 51):
                norm.data.mul_(1.001)
                sync.push(f"many-{version}")
        finally:
            done.set()
        answers = [answer for future in futures for answer in future.result(300)]
    assert len(answers) >= 64
    for answer in answers:
        numbers = [order[version] for version in answer["versions"]]
        assert (answer["finish"], len(answer["token_ids"])) == ("length", 40)
        assert numbers == sorted(set(numbers))
        assert answer["told"] == [answer["versions"][0], answer["versions"][-1]]
    assert any(len(answer["versions"]) > 1 for answer in answers)
    assert server.status()["versions"] == ["many-50"]


def test_two_thousand_malformed_requests_change_nothing_while_generation_goes_on(server: Server, sync: WeightSync, model: Any) -> None:
    become(model, 3)
    sync.push("sound")

    async def main() -> tuple[Counter[int], int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def generate() -> None:
                assert (await asyncio.to_thread(server.generate, PROMPTS[0]))["finish"] == "length"

            return await attack(http, TOKEN, 2_000, generate)

    codes, ended = asyncio.run(main())
    assert codes.total() == 2_000
    assert ended > 10
    serves(server, model, "sound")
    become(model, 4)
    sync.push("sound-again")
    serves(server, model, "sound-again")


def test_the_token_is_nowhere_to_be_seen(server: Server) -> None:
    """Not in what any process of the server was started with or has logged, and not in the children's environment."""
    for process in server.processes():
        assert TOKEN not in Path(f"/proc/{process}/cmdline").read_text()
        if process != server.process.pid:
            assert TOKEN not in Path(f"/proc/{process}/environ").read_text()
    stranger = HttpEngine(server.url, "not-" + TOKEN[4:])
    with WeightSync({"weight": torch.zeros(1)}, [stranger]) as sync, pytest.raises(ConfigError) as caught:
        sync.push("no")
    assert TOKEN not in str(caught.value)
    assert "401" in str(caught.value)
    for path in ("hello", "status", "prepare", "anything"):
        assert server.get(f"/instep/v1/{path}")[0] == 401
    log = server.log.read_text(errors="replace")
    assert "POST /instep/v1/hello" in log
    assert TOKEN not in log


def test_the_log_has_a_line_for_a_push_and_none_for_its_requests(server: Server, sync: WeightSync, model: Any) -> None:
    become(model, 3)
    before = len(server.log.read_text(errors="replace"))
    sync.push("logged")
    added = server.log.read_text(errors="replace")[before:]
    assert re.search(r"vllm serves logged \(after \d+\.\d\d s\), pushed by trainer [0-9a-f]{8} at 127\.0\.0\.1\n", added)
    assert "/instep/v1/" not in added


def test_nobody_needs_a_development_flag(server: Server) -> None:
    environment = Path(f"/proc/{server.process.pid}/environ").read_text()
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment
    assert server.get("/collective_rpc")[0] == 404
    assert os.environ.get("INSTEP_TOKEN") is None
