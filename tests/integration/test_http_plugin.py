"""vLLM's own server, started by its own program: the routes come with the endpoint plug-in, clients
are told which weights made an answer. Replicas are one engine."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_server import TOKEN, Server
from models import add_tokenizer, save, tiny
from openai_clients import ASKS, FIRST, LAST, PROMPT, ROUTES, WHOLE, Told, client_of, posted
from plain_tokens import trainer_logprobs
from test_http_serve import CLOSE, become, serves

import instep
from instep import WeightSync
from instep.engine.remote.http import HttpEngine

DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: instep\nVersion: 0.1.0\n",
    "entry_points.txt": "[vllm.general_plugins]\ninstep = instep.engine.vllm.plugin:register\n"
    "[vllm.endpoint_plugins]\ninstep = instep.engine.vllm.routes:EndpointPlugin\n",
}
"""What an installed instep has of `pyproject.toml`; the one under test may not be installed."""


class PluginServer(Server):
    def program(self, model: str) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]

    def settings(self) -> dict[str, str]:
        folder = self.log.parent / "site" / "instep-0.1.0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in DISTRIBUTION.items():
            (folder / name).write_text(text)
        paths = [str(folder.parent), str(Path(instep.__file__).parents[1]), str(Path(__file__).parent)]
        return {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "instep"}


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginServer]:
    folder = tmp_path_factory.mktemp("plugged")
    model = add_tokenizer(save(tiny("qwen3", 1), folder / "model"))
    server = PluginServer(model, folder / "log", skip_tokenizer_init=False)
    try:
        yield server.wait()
    finally:
        server.stop()


def follows_a_trainer(server: Server, replicas: int = 1) -> None:
    model = tiny("qwen3", 2)
    assert server.get("/instep/v1/status")[0] == 401
    with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=60) as sync:
        for seed in (2, 3):
            become(model, seed)
            sync.push(f"seed-{seed}")
            for _ in range(replicas + 1):  # each of them answers some
                serves(server, model, f"seed-{seed}")
    workers = server.status()["workers"]
    assert [worker["rank"] for worker in workers] == list(range(replicas))
    assert len({worker["pid"] for worker in workers}) == replicas


def test_a_trainer_pushes_to_a_server_with_the_plug_in(plugged: PluginServer) -> None:
    follows_a_trainer(plugged)


def test_a_trainer_pushes_to_replicas_behind_one_server(tmp_path: Path) -> None:
    server = Server(save(tiny("qwen3", 1), tmp_path / "model"), tmp_path / "log", data_parallel_size=2)
    try:
        follows_a_trainer(server.wait(), replicas=2)
    finally:
        server.stop()


@pytest.mark.parametrize("route", [*ROUTES, *WHOLE])
def test_every_route_that_generates_tells_which_weights_made_the_answer(plugged: PluginServer, route: str) -> None:
    version = plugged.generate([1, 2, 3])["versions"][0]
    answer = posted(plugged, route, {**ROUTES, **WHOLE}[route])
    assert (answer.headers[FIRST], answer.headers[LAST]) == (version, version)
    if route in ROUTES:
        answer = posted(plugged, route, {**ROUTES[route], "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert answer.headers[FIRST] == version
        assert json.loads(events[-1])["instep"] == {"version_first": version, "version_last": version}


def test_a_route_that_does_not_generate_tells_none(plugged: PluginServer) -> None:
    assert FIRST not in posted(plugged, "/tokenize", {"prompt": PROMPT}).headers


def test_openai_clients_are_told_while_pushes_come(plugged: PluginServer) -> None:
    """In every kind of answer some span a push, and none names a version that was served before it was asked for."""
    model, client = tiny("qwen3", 2), client_of(plugged)
    norm = model.get_parameter("model.norm.weight")
    versions, done = ["openai-0"], threading.Event()

    def ask(kind: str) -> list[tuple[int, Told, int]]:
        """Each answer between the numbers of versions that were pushed when it was asked for and when it came."""
        found = []
        while not done.is_set():
            before = len(versions) - 1
            found.append((before, ASKS[kind](client, str(plugged.model), 80), len(versions)))
        return found

    with WeightSync(model, [HttpEngine(plugged.url, TOKEN)]) as sync, ThreadPoolExecutor(len(ASKS)) as pool:
        sync.push(versions[0])
        answers = {kind: pool.submit(ask, kind) for kind in ASKS}
        try:
            for number in range(1, 31):
                norm.data.mul_(1.001)
                sync.push(f"openai-{number}")
                versions.append(f"openai-{number}")
        finally:
            done.set()
        for kind, answer in answers.items():
            found = answer.result(120)
            for before, told, after in found:
                first, last = versions.index(told.first), versions.index(told.last)
                assert before <= first <= last <= after, kind
            assert any(told.first != told.last for _, told, _ in found), kind


def test_the_labels_are_those_of_the_weights_that_made_the_tokens(plugged: PluginServer) -> None:
    """Two models take turns. What each makes of a prompt and of the tokens before differs by nats."""
    model, others = tiny("qwen3", 2), {str(seed): tiny("qwen3", seed) for seed in (2, 3)}
    done, answers = threading.Event(), []

    def ask() -> None:
        while not done.is_set():
            answers.append(plugged.generate([1, 2, 3], 80))

    asking = threading.Thread(target=ask)
    with WeightSync(model, [HttpEngine(plugged.url, TOKEN)]) as sync:
        sync.push("turn-0-2")
        asking.start()
        try:
            for turn in range(1, 13):
                become(model, seed := 2 + turn % 2)
                sync.push(f"turn-{turn}-{seed}")
        finally:
            done.set()
            asking.join(120)
    for answer in answers:
        for version, start, end in answer["spans"]:
            said, logprobs = answer["token_ids"][:end], answer["logprobs"][start:end]
            weights = others[version.rpartition("-")[2]]
            there = trainer_logprobs(weights, answer["prompt"], said, 1.0)[start:]
            assert max(abs(one - other) for one, other in zip(logprobs, there, strict=True)) < CLOSE
    assert any(answer["told"][0] != answer["told"][1] for answer in answers)
