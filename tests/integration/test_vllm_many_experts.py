"""As many tensors as a large mixture of experts has, 18,867 in 48 layers of 128 experts, each of them tiny: what an engine generates after
three pushes is what it generated when it had loaded the same weights from disk, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Generated, greedy
from http_server import TOKEN, Server
from models import PROMPTS, save, tiny

from instep import WeightSync
from instep.engine.remote.http import HttpEngine

TENSORS = 18_867
SIZES = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 32, "moe_intermediate_size": 64}
SECONDS = 300.0
"""For each step of a push, on a machine that does other things."""


def mixture(seed: int) -> Any:
    return tiny("qwen3_moe", seed, **SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with seed 2."""
    return save(mixture(2), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with random weights of its own. It may not be ready yet."""
    server = Server(folder, tmp_path_factory.mktemp("server") / "log")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def alone(server: Server, engine: Callable[..., Any], folder: Path) -> Any:
    """One worker that loaded the checkpoint, while the server starts too."""
    return engine(folder, load_format="auto", worker_extension_cls="summed.SummingExtension")


@pytest.fixture(scope="module")
def from_disk(alone: Any) -> Generated:
    """What the checkpoint generates before any push."""
    return greedy(alone, PROMPTS)


def bring(llm: Any, transport: Any) -> Generated:
    """Pushes two other versions and then the weights that the engine loaded from disk. Returns what
    it generates in the end."""
    model, before = mixture(3), llm.collective_rpc("held")
    with WeightSync(source=model, engines=[llm], transport=transport, timeout=SECONDS) as sync:
        for version, seed in (("away", 3), ("farther", 4), ("back", 2)):
            model.load_state_dict(mixture(seed).state_dict())
            receipt = sync.push(version)
            assert (receipt.tensors, receipt.transport) == (TENSORS, "shm" if transport == "auto" else transport)
            held = llm.collective_rpc("held")
            assert (held == before) == (version == "back"), version
    return greedy(llm, PROMPTS)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_one_worker(alone: Any, from_disk: Generated, transport: Any) -> None:
    assert bring(alone, transport) == from_disk


def test_a_server(server: Server, from_disk: Generated) -> None:
    model = mixture(3)
    engine = HttpEngine(server.wait().url, TOKEN)
    with WeightSync(source=model, engines=[engine], transport="http", timeout=SECONDS) as sync:
        for version, seed in (("away", 3), ("farther", 4), ("as-on-disk", 2)):
            model.load_state_dict(mixture(seed).state_dict())
            receipt = sync.push(version)
            assert (receipt.tensors, receipt.transport) == (TENSORS, "http")
    answers = [server.generate(prompt) for prompt in PROMPTS]
    assert [(answer["token_ids"], answer["logprobs"]) for answer in answers] == from_disk
    assert {version for answer in answers for version in answer["versions"]} == {"as-on-disk"}


@pytest.mark.exhaustive
def test_two_workers(engine: Callable[..., Any], folder: Path) -> None:
    llm = engine(folder, load_format="auto", tensor_parallel_size=2, worker_extension_cls="summed.SummingExtension")
    from_disk = greedy(llm, PROMPTS)
    for transport in ("auto", "gloo"):
        assert bring(llm, transport) == from_disk
