"""Pushes to a real `instep serve` by its URL, and who may make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import TOKEN, Server
from models import PROMPTS, tiny

from instep import WeightSync
from instep.engine.http import HttpEngine


@pytest.fixture(scope="module")
def server(checkpoints: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(checkpoints("qwen3", 1), tmp_path_factory.mktemp("server") / "log")
    try:
        yield server.wait()
    finally:
        server.stop()


def test_pushes_bring_the_weights_that_a_fresh_engine_would_load(server: Server, reference: Callable[..., Any]) -> None:
    model = tiny("qwen3", 2)
    with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=60) as sync:
        for seed in (2, 3):
            model.load_state_dict(tiny("qwen3", seed).state_dict())
            receipt = sync.push(f"seed-{seed}")
            answers = [server.generate(prompt) for prompt in PROMPTS]
            assert [(answer["token_ids"], answer["logprobs"]) for answer in answers] == reference("qwen3", seed)
            assert {version for answer in answers for version in answer["versions"]} == {f"seed-{seed}"}
            assert receipt.engines[0].read_back > 0
    status = server.status()
    assert (status["state"], status["versions"], status["paused"], status["refuses"]) == ("serving", ["seed-3"], False, None)
